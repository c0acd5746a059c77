"""The `Subject`: a model with its inputs, and what can be asked of it.

B batch, T positions, L layers, H heads of a layer, C classes.
"""

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mha_haiku import interop
from mha_haiku.core import checks, display, models, sites
from mha_haiku.lab import heads
from mha_haiku.lab.heads import running
from mha_haiku.subjects import answers, inputs
from mha_haiku.subjects.studies import generation, head_statistics, pruning, workbench
from mha_haiku.subjects.studies.workbench import Bench
from mha_haiku.training import tasks
from mha_haiku.training.runs import configuration, folders

Array = jax.Array

EXAMPLES = 64  # held-out examples that measures are of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Subject:
    """A model with its parameters and its inputs, which can be asked about its heads.

    `mh.load` and `mh.wrap` make one. Every verb takes texts, lists of texts, token ids
    or arrays, or a batch of examples. `measured` is what `mh.heads` takes.
    """

    model: models.Model
    params: Any
    name: str
    run: folders.Run | None = None  # also of pretrained weights that have a tokenizer
    codec: inputs.Codec = inputs.Codec()  # what encodes texts
    metric: heads.Metric | None = None  # None: the task's own
    # Examples that measures are of; None: held-out examples of the task.
    batches: Sequence[tasks.Example] | None = None

    @classmethod
    def of_run(cls, run: folders.Run, name: str) -> "Subject":
        """Makes a run a subject, with looped layers, so that each has a name."""
        run = run.looped()
        return cls(run.model, run.params, name, run, inputs.of_task(run.task))

    _repr_html_ = display.html

    def __repr__(self) -> str:
        count = sum(x.size for x in jax.tree.leaves(self.params))
        step = f", step {self.run.step:,}" if self.run and self.run.step else ""
        return f"Subject({self.name!r}{step}: {self.model}, {count:,} parameters)"

    @property
    def config(self) -> configuration.RunConfig | None:
        """The config of the run; None of a model without one."""
        return None if self.run is None else self.run.config

    @property
    def task(self) -> tasks.Task | None:
        """The task of the run; None of a model without one."""
        return None if self.run is None else self.run.task

    # --- Inputs

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as tokens, `[T]` integers."""
        return np.asarray(self.codec.encode(text), np.int32)

    def decode(self, tokens: Any) -> str:
        """Decodes tokens `[T]` to a text."""
        return self.codec.decode(np.asarray(tokens).tolist())

    def examples(self, count: int = EXAMPLES) -> tasks.Example:
        """Makes the first held-out examples, a batch of B = `count`."""
        if self.run is None:
            self._refuse("examples", "has no task; pass examples to mh.wrap")
        return self.run.examples(count)

    # --- What the model computes

    def logits(self, inputs: Any) -> Array:
        """Computes logits `[T, C]` of a text, or `[B, T, C]` of several.

        A model that pools positions gives `[C]`, or `[B, C]`.
        """
        batch, is_one = self._batch(inputs)
        logits = running.run(self.model, self.params, batch).logits
        if logits is None:
            self._refuse("logits", "gives no logits")
        return logits[0] if is_one else logits

    def maps(self, inputs: Any, *, why: int = 0) -> answers.TextMaps:
        """Computes the attention map of each layer, with its tokens.

        Of one text, the page says for the `why` largest weights of each query why these
        keys are looked at; it takes seconds.
        """
        batch, _ = self._one(inputs) if why else self._batch(inputs)
        given = self.model, self.params, batch
        cells = tuple(heads.why.cells(*given, key=-1 - i) for i in range(why))
        if self.model.config is None:
            _, maps = self.look(batch, ["*/map"])
        else:
            maps = running.run(self.model, self.params, batch).maps
        return answers.TextMaps(maps, *self._labels(batch), cells)

    def look(self, inputs: Any, at: Any) -> tuple[Any, dict[str, Any]]:
        """Runs the model: its `Output`, and what is at its sites; see `mh.look`."""
        batch, _ = self._batch(inputs)
        return running.look(self.model, self.params, batch, at)

    def sites(self, inputs: Any) -> sites.Sites:
        """Lists the sites of the model, with shapes; runs nothing."""
        batch, _ = self._batch(inputs)
        run = functools.partial(running.run, self.model)
        return sites.sites(run, self.params, batch)

    def edited(self, edits: Mapping[str, Callable]) -> "Subject":
        """Changes values at sites of the model, see `mh.edit`."""
        model = _edited(self.model, dict(edits))
        run = self.run and self.run._replace(model=model)
        return dataclasses.replace(self, model=model, run=run)

    def ablated(self, *chosen: tuple[int, int]) -> "Subject":
        """Ablates heads: (attention layer, head), ...

        Raises:
          ValueError: If there is no such layer or head.
        """
        counts = self._head_counts()
        by_path: dict[str, list[int]] = {}
        for layer, head in chosen:
            by_path.setdefault(_part(counts, layer, head), []).append(head)
        edits = itertools.starmap(heads.edits.ablate, by_path.items())
        return self.edited(dict(collections.ChainMap(*edits)))

    def generate(
        self, prompt: str, *, tokens: int | None = None, seed: int = 0, **strategy: Any
    ) -> str:
        """Continues a prompt, or answers a source, with at most so many tokens.

        The strategy is by keywords of `studies.generation.strategy`: `temperature`,
        `top_k`, `top_p`, `beam` and `length_penalty`.

        Raises:
          ValueError: If the model continues no text, the prompt cannot be encoded or
            leaves no room, or the strategy contradicts itself.
        """
        bench = self._bench("generate")
        kind = generation.given(bench.run.config)
        if kind is None:
            self._refuse("generate", "does not continue a text")
        how = generation.strategy(kind, **strategy)
        job = generation.job(bench, kind, [prompt], how, tokens=tokens, seed=seed)
        (text,) = generation.write(job)
        return text.text

    def metrics(self, whole: "Subject | None" = None) -> dict[str, float]:
        """Measures loss and accuracy on held-out examples, over all queries.

        If the task has no targets: the drift from the `whole` subject and `neighbours`,
        the share of examples whose nearest other example stays the same.
        """
        before = whole and pruning.vectors_of(whole._bench("metrics").run)
        return pruning.held_out(self._bench("metrics").run, before)

    # --- What its heads do

    def statistics(self, examples: int = EXAMPLES) -> head_statistics.HeadStatistics:
        """Measures what each head does; means over held-out examples."""
        return head_statistics.measure(self._bench("statistics"), examples=examples)

    def roles(self, examples: int = EXAMPLES) -> heads.Roles:
        """Finds the role of each head on examples."""
        align = None if self.run is None else self.run.task.alignments
        batches = self.measured(examples).batches
        return heads.roles(self.model, self.params, batches, align=align)

    def measured(
        self, examples: int = EXAMPLES, metric: str | None = None
    ) -> heads.Measured:
        """Returns what measures of `mh.heads` take; arguments as in `importance`."""
        if self.batches is not None:
            own = self.metric or heads.metrics.loss
            return heads.Measured(self.model, own, self.params, self.batches)
        if self.run is None:
            self._refuse("measuring", "has no examples; pass examples to mh.wrap")
        bench = self._bench("measuring")
        return bench.measured(examples, metric=metric, name="examples")

    def importance(
        self,
        measure: str = "ablation",
        examples: int = EXAMPLES,
        *,
        metric: str | None = None,
    ) -> heads.Importance:
        """Measures how much each head matters, by a name of `heads.MEASURES`.

        The metric is "loss", "accuracy", "exact_match" or "drift"; None: the first of
        the task. A wrapped function has its own, and its own examples.

        Raises:
          ValueError: If there is no such measure, or the task has no such metric.
        """
        checks.choice("measure", measure, heads.MEASURES)
        return heads.MEASURES[measure].measure(self.measured(examples, metric))

    def patch(
        self,
        clean: Any,
        corrupted: Any,
        *,
        answers: tuple[Any, Any] | None = None,
        into: str = "corrupted",
        **options: Any,
    ) -> heads.Patched:
        """Measures what changes when an activation is replaced by the other text's.

        The metric is the logit of the wrong answer less the logit of the right one, at
        the last position: patching what carries the answer makes it fall.

        Args:
          clean: A text, or several.
          corrupted: Texts of the same numbers of tokens.
          answers: The right and the wrong answer: tokens, or texts of one token each;
            None: what the model answers to the clean and to the corrupted text.
          into: The run that is patched, "clean" or "corrupted".
          **options: `what` and `per_position` of `heads.activation_patching`.

        Raises:
          ValueError: If the texts differ in their numbers of tokens, or the model
            answers the same to both and no answers are given.
        """
        pair, tokens = self._pair(clean, corrupted, answers)
        found = heads.activation_patching(*pair, into=into, **options)
        return dataclasses.replace(found, tokens=tokens, unit=_LOGITS)

    def paths(
        self,
        clean: Any,
        corrupted: Any,
        *,
        answers: tuple[Any, Any] | None = None,
        **options: Any,
    ) -> heads.Edges:
        """Measures what changes when a head reads of another what the other text has.

        Arguments are as in `patch`, and by keyword as in `heads.path_patching`.
        """
        pair, _ = self._pair(clean, corrupted, answers)
        if self.model.config is None:
            options.setdefault("through_units", True)
        found = heads.path_patching(*pair, **options)
        return dataclasses.replace(found, unit=_LOGITS)

    def circuit(
        self,
        clean: Any,
        corrupted: Any,
        *,
        edges: int = 50,
        answers: tuple[Any, Any] | None = None,
        measure: str = "integrated_edge_attribution",
        **options: Any,
    ) -> heads.Circuit:
        """Finds the edges that carry the answer, and how much of it they carry.

        Arguments are as in `patch` and in `heads.circuit`.
        """
        pair, _ = self._pair(clean, corrupted, answers)
        return heads.circuit(*pair, edges=edges, measure=measure, **options)

    def lens(self, inputs: Any) -> answers.Lens:
        """Reads what each layer would answer to a text, were it the last."""
        batch, (tokens, _) = self._one(inputs)
        logits = heads.logit_lens(self.model, self.params, batch)[:, 0]
        chances = np.asarray(jax.nn.softmax(logits))
        best = chances.argmax(-1)
        label = str if self.run is None else self.run.task.class_label
        texts = np.array([[label(c) for c in row] for row in best.tolist()])
        tokens = tokens or ("",) * len(logits[0])
        return answers.Lens(tokens, texts, chances.max(-1), logits)

    def circuits(self, kind: str = "k") -> answers.Circuits:
        """Measures how much each head reads from each other one, by weights alone.

        It reads by its "q", "k" or "v", as `kind` says.
        """
        scores = heads.circuits.compositions(self.model, self.params, kind)
        return answers.Circuits(kind, scores)

    def why(
        self,
        inputs: Any,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int = -1,
        key: int | None = None,
        **options: Any,
    ) -> heads.why.Pairs | heads.why.Cells:
        """Explains why a head looks there: its score by pairs of components.

        Inputs are one text, or one row of tokens. A key of None is the one with the
        largest weight. Without a layer the largest pairs of all heads are returned.
        Options are as in `heads.why.pairs`, or in `heads.why.cells`.

        Raises:
          ValueError: If there is no such place, or the query does not see the key.
        """
        batch, labels = self._one(inputs)
        given = self.model, self.params, batch
        if layer is None:
            return heads.why.cells(*given, [query], key, **options)
        found = heads.why.pairs(*given, layer, head, query, key, **options)
        texts = [
            side[i] for side, i in zip(labels, found.place[2:], strict=True) if side
        ]
        title = " ".join([found.title, *map(repr, texts)])
        return dataclasses.replace(found, title=title)

    def writes(
        self, inputs: Any, *, layer: int, head: int, query: int = -1, answer: Any = None
    ) -> heads.why.Terms:
        """Splits what a head writes by source position and component.

        Arguments are as in `why`; `answer`, a token or its text, asks for its logit.
        """
        batch, (_, texts) = self._one(inputs)
        given = self.model, self.params, batch, layer, head, query
        found = heads.why.written(*given, answer=self._token(answer))
        sources = tuple(f"{i} {text!r}" for i, text in enumerate(texts))
        labels = sources or found.labels[0], found.labels[1]
        return dataclasses.replace(found, labels=labels)

    def reads(self, examples: Any = EXAMPLES) -> heads.why.Reads:
        """Measures what each head's queries, keys and values read, over examples.

        These are as in `strongest`; next to it stands the composition from weights.
        """
        batch = self._searched(examples)
        return heads.why.reads(self.model, self.params, [batch])

    def strongest(
        self, layer: int, head: int, examples: Any = 256, *, count: int = 10
    ) -> answers.Strongest:
        """Finds where in the data a head attends most, of queries that see another key.

        Args:
          layer: The layer, of all attention parts.
          head: Number of the head in its layer.
          examples: Number of held-out examples to search, or inputs: a list of texts.
          count: Number of places to return, each from another example.

        Raises:
          ValueError: If there is no such layer or head.
        """
        batch = self._searched(examples)
        path = _part(self._head_counts(batch), layer, head)
        found = _strongest(self.model, path)(self.params, batch)
        weights, keys = (np.asarray(x)[:, head] for x in found)
        # The largest weight of a query that sees one key is always 1.
        sees = keys[..., -1] >= 0
        valid = running.valid(sees.shape[1], batch, running.kind_of(path))
        values = np.where(sees & np.asarray(valid), weights, -np.inf)
        queries, best = values.argmax(-1), values.max(-1)
        order = np.argsort(-best, kind="stable")
        order = order[np.isfinite(best[order])][:count]
        tokens = self._labels(batch)[0]
        return answers.Strongest(
            layer,
            head,
            order,
            queries[order],
            keys[order, queries[order], 0],
            best[order],
            tuple(tokens[i] for i in order) if tokens else (),
        )

    # --- Other models of it

    def prune(self, keep: float | Sequence[Sequence[int]] = 0.5) -> "Subject":
        """Removes some of the heads for good.

        `keep` names the heads that each layer keeps; or it is the share of all heads to
        keep, the most important ones by ablation.

        Raises:
          ValueError: If `keep` is not in (0, 1], or the model has no task.
        """
        bench = self._bench("prune")
        if isinstance(keep, int | float):
            share = checks.positive_number("keep", keep)
            if share > 1:
                raise ValueError(f"keep must be a share of at most 1, got {keep!r}.")
            order = heads.order(self.importance().mean)
            count = max(1, round(share * len(order)))
            keep = pruning.kept_after(bench.run, order, count)
        run = pruning.prune_heads(bench.run, keep)
        return dataclasses.replace(self, model=run.model, params=run.params, run=run)

    def train(self, workdir: str | os.PathLike, *, steps: int) -> "Subject":
        """Trains further, as a run in a new folder; the same call resumes it.

        Raises:
          ValueError: If the model has edits, or no task.
          ConfigError: If the folder holds another run.
        """
        if _is_edited(self.model):
            self._refuse("train", "has edits, which are no parameters")
        folder = pruning.save(self._bench("train").run, workdir, steps=steps)
        return Subject.of_run(folders.load_run(folder), folder.name)

    def save(self, folder: str | os.PathLike, *, family: str | None = None) -> Path:
        """Writes the model as a folder that `transformers` and `mh.load` open.

        Pruned heads are there with weights of 0, as a config.json of `transformers`
        cannot say that a head is missing; `family="mha_haiku"` leaves them out. Other
        families are listed at `interop.save`.

        Raises:
          ValueError: If the model is a function, or has edits.
        """
        config = self.model.config
        if config is None or _is_edited(self.model):
            self._refuse("save", "is a function, of which there are no weights to save")
        tokenizer = getattr(self.task, "encoder", None)
        return interop.save(
            folder, config, self.params, tokenizer=tokenizer, family=family
        )

    # --- Pictures

    def show(self, inputs: Any = None, *, why: int = 0, **options: Any) -> Any:
        """Shows the page of `maps` of inputs; None: of held-out examples."""
        if inputs is None and self.run is not None:
            return display.show(self, **options)
        if inputs is None:
            self._refuse("show", "has no task; give inputs")
        return self.maps(inputs, why=why).show(**options)

    def plot(self, inputs: Any, **options: Any) -> Any:
        """Draws the maps of inputs; see `mh.plot`."""
        return self.maps(inputs).plot(**options)

    # --- Parts of the above

    def _searched(self, examples) -> tasks.Example:
        """Returns so many held-out examples, or a batch of inputs."""
        if isinstance(examples, int):
            return self.examples(examples)
        return self._batch(examples)[0]

    def _batch(self, given) -> tuple[tasks.Example, bool]:
        needs_target = self.run is not None and self.run.task.target_length is not None
        if needs_target and not isinstance(given, tasks.Example):
            raise ValueError(
                "inputs must be a batch of examples for a model with a decoder, which "
                "reads a target too; examples(count) gives some."
            )
        return inputs.batch(self.codec, given)

    def _one(self, given) -> tuple[tasks.Example, tuple[tuple, tuple]]:
        """Makes one example, with the texts at its queries and its keys."""
        batch = self._batch(given)[0]
        if len(batch.inputs) != 1:
            raise ValueError(
                f"inputs must be one text or one row, got {len(batch.inputs)}."
            )
        own, keys = self._labels(batch)
        own = own[0] if own else ()
        return batch, (own, keys[0] if keys else own)

    def _token(self, answer) -> int | None:
        return None if answer is None else inputs.one_token(self.codec, answer)

    def _labels(self, batch) -> tuple[tuple, tuple]:
        """Lists the texts at queries and keys of each example; (): unknown."""
        if batch.decoder_inputs is None or self.run is None:
            return inputs.labels(self.codec, batch), ()
        rows, task = workbench.rows_of(batch), self.run.task
        return (
            tuple(tuple(task.decoder_labels(row)) for row in rows),
            tuple(tuple(task.labels(row)) for row in rows),
        )

    def _head_counts(self, batch=None) -> dict[str, int]:
        """Counts the heads of each attention part, by its path."""
        batch = batch or (self.batches or [None])[0]
        if self.model.config is not None:
            places = models.heads_of_layers(self.model.config)
            return {place.path: len(place.names) for place in places}
        if batch is None:
            self._refuse("ablated", "has no examples; use edited with mh.sites' names")
        run = functools.partial(running.look, self.model, at=["*/heads"])
        _, found = jax.eval_shape(run, self.params, example=batch)
        return {x.removesuffix("/heads"): y.shape[-2] for x, y in found.items()}

    def _bench(self, verb) -> Bench:
        if self.run is None:
            self._refuse(
                verb, "has no task; a run, or weights with a tokenizer, has one"
            )
        run = self.run._replace(params=self.params)
        return Bench(run, folders.Folder(Path(self.name)))

    def _pair(self, clean, corrupted, given):
        """Makes what is measured and the corrupted batches, and the clean tokens."""
        batches = [self._batch(x)[0] for x in (clean, corrupted)]
        shapes = [np.shape(x.inputs) for x in batches]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "corrupted must have as many tokens as clean, "
                f"{shapes[0][1]}, got {shapes[1][1]}: "
                f"{[list(row) for row in self._labels(batches[1])[0][:1]]}."
            )
        if given is None:
            right, wrong = (
                np.asarray(heads.metrics.at_last(self.logits(x), x).argmax(-1))
                for x in batches
            )
            if (right == wrong).any():
                label = self.codec.label if self.run is None else self.task.class_label
                same = label(int(right[right == wrong][0]))
                raise ValueError(
                    "answers must be given, (right, wrong): the model answers "
                    f"{same!r} to both."
                )
        else:
            count = shapes[0][0]
            right, wrong = (
                np.full(count, inputs.one_token(self.codec, x)) for x in given
            )
        targets = np.stack([right, wrong], -1).astype(np.int32)
        weights = np.ones(targets.shape, np.float32)
        labels = self._labels(batches[0])[0]
        clean, corrupted = (
            [x._replace(targets=targets, weights=weights)] for x in batches
        )
        metric = heads.metrics.logit_difference
        of = heads.Measured(self.model, metric, self.params, clean)
        return (of, corrupted), labels[0] if len(labels) == 1 else ()

    def _refuse(self, verb, why):
        raise ValueError(f"{verb} is not for {self.name!r}, which {why}.")


_LOGITS = "logit difference"


def _part(counts, layer, head) -> str:
    """Finds the path of an attention part that has such a head."""
    checks.integer_in("layer", layer, 0, len(counts) - 1)
    path = list(counts)[layer]
    checks.integer_in("head", head, 0, counts[path] - 1)
    return path


def _edited(model, edits) -> models.Model:
    """Edits a model, also token by token and with scanned layers."""
    decoding = model.decoding
    if decoding is not None:
        decoding = decoding._replace(
            prefill=sites.edit(decoding.prefill, edits),
            step=sites.edit(decoding.step, edits),
        )
    return model._replace(
        apply=sites.edit(model.apply, edits),
        scanned=None,
        decoding=decoding,
        description=f"{model.description}, edited",
    )


def _is_edited(model) -> bool:
    return model.description.endswith(", edited")


@functools.lru_cache(maxsize=8)
def _strongest(model, path):
    """Makes a program: each query's largest weight, and its two keys."""

    @jax.jit  # which does not keep what else the model computes
    def run(params, batch):
        def largest(attention_map):
            top = attention_map.top(min(2, attention_map.shape[-1]))
            return top.weights[..., 0], top.positions

        _, found = running.look(model, params, batch, {f"{path}/map": largest})
        return found[f"{path}/map"]

    return run
