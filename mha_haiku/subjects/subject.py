"""The `Subject`: a model with its inputs, and verbs that study its heads.

B batch, T positions.
"""

import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    NoReturn,
    Self,
    TypeGuard,
    TypeVar,
    cast,
    overload,
)

import jax
import numpy as np

from mha_haiku.core import arguments, checks, display, models
from mha_haiku.interop import torch_modules
from mha_haiku.lab import heads
from mha_haiku.lab.heads import model_runs
from mha_haiku.records import Layer
from mha_haiku.subjects import encoding, example_rows
from mha_haiku.training import devices, evaluation, tasks
from mha_haiku.training.runs import configuration, folders, progress

EXAMPLES = 64  # held-out examples, unless a verb says otherwise


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Subject:
    """A model with its parameters and inputs, and methods that study its heads.

    `mh.load`, `mh.train` and `mh.wrap` make one; edits are a field of its model. The
    functions of `mh.subjects.verbs` are its methods. Inputs are texts, lists of texts,
    token ids, arrays or a batch of examples. `measured` makes the argument of functions
    of `mh.heads`.

    Example:
      >>> def f(params, tokens):  # to logits [B, T, C]
      ...     return params["embedding"][tokens] @ params["embedding"].T
      ...
      >>> params = {"embedding": jax.random.normal(jax.random.key(0), (7, 4))}
      >>> subject = mh.wrap(f, params, name="a bigram model")
      >>> subject.name
      'a bigram model'
    """

    model: models.Model
    params: Any
    name: str
    codec: encoding.Codec = encoding.Codec()  # what encodes texts
    metric: heads.Metric | None = None  # of a wrapped function; defaults to the task's
    # Examples to measure a wrapped function on; default to the task's held-out ones.
    batches: Sequence[tasks.Example] | None = None
    certifier: torch_modules.Certifier | None = None  # of a PyTorch module
    module: Any = None  # of PyTorch, with the same names of parameters
    left: "Sequence[Part]" = ()  # of a pruned function: all parts, with what is left
    filled: Callable[[Any], Any] | None = None  # makes parameters of the whole one
    saving: str = ""  # by pruning, in words
    # Of runs, and of pretrained weights that have a tokenizer:
    config: configuration.RunConfig | None = None
    task: tasks.Task | None = None
    step: int = 0
    folder: folders.Folder | None = None  # of a run on disk
    placement: devices.Sharded | None = None  # None for one device
    progress: Callable[..., Iterator] = progress.over  # wraps an iterable
    # What `computation.once` has made; subjects made of one another share it.
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_run(
        cls, run: folders.Run, name: str, folder: folders.Folder | None = None
    ) -> "RunSubject":
        """Makes a run a subject, with looped layers, so that each has a name."""
        config, task, model, params, step = run.looped()
        codec = encoding.of_task(task)
        subject = cls(
            model,
            params,
            name,
            codec,
            config=config,
            task=task,
            step=step,
            folder=folder,
        )
        return cast(RunSubject, subject)

    @classmethod
    def of_folder(
        cls,
        workdir: str | os.PathLike,
        step: int | None = None,
        *,
        trust: bool = False,
    ) -> "RunSubject":
        """Loads the run in a folder; see `runs.load_run`."""
        run = folders.load_run(workdir, step, trust=trust)
        folder = folders.Folder(checks.as_path(workdir))
        return cls.of_run(run, folder.root.resolve().name, folder)

    _repr_html_ = display.html

    if TYPE_CHECKING:  # `verb` makes these methods when their modules are imported
        from mha_haiku.subjects.verbs.causes import circuit, compositions, patch, paths
        from mha_haiku.subjects.verbs.explanations import reads, strongest, why, writes
        from mha_haiku.subjects.verbs.gate_fits import learn_gates
        from mha_haiku.subjects.verbs.generation import generate
        from mha_haiku.subjects.verbs.per_head import (
            importance,
            measured,
            roles,
            statistics,
        )
        from mha_haiku.subjects.verbs.prune_sweep import sweep
        from mha_haiku.subjects.verbs.pruned_models import prune
        from mha_haiku.subjects.verbs.quality import metrics
        from mha_haiku.subjects.verbs.rollouts import rollout
        from mha_haiku.subjects.verbs.saved_models import save
        from mha_haiku.subjects.verbs.values import (
            check,
            lens,
            logits,
            look,
            maps,
            plot,
            show,
            sites,
        )
        from mha_haiku.subjects.verbs.wrapped_runs import train

    def __repr__(self) -> str:
        count = sum(x.size for x in jax.tree.leaves(self.params))
        step = f", step {self.step:,}" if self.step else ""
        torch = "" if self.certifier is None else f", {self.certifier}"
        torch += ", a program per input" if self.codec.reads else ""
        return (
            f"Subject({self.name!r}{step}: {self.model}, {count:,} parameters"
            f"{self.saving}{torch})"
        )

    @property
    def title(self) -> str:
        """The name, task and step: "two_heads (reverse), step 300"."""
        if self.task is None:
            return self.name
        task = "" if self.name == self.task.name else f" ({self.task.name})"
        return f"{self.name}{task}, step {self.step}"

    def replace(self, **fields: Any) -> Self:
        """Returns the subject with other fields."""
        return dataclasses.replace(self, **fields)

    # --- Inputs

    @overload
    def encode(self, text: str, image: None = None) -> np.ndarray: ...

    @overload
    def encode(self, text: str | Sequence[str], image: Any = None) -> Any: ...

    def encode(self, text: str | Sequence[str], image: Any = None) -> Any:
        """Encodes a text as tokens, `[T]` integers; a list of texts as a list.

        With an image, as of `Codec.with_image`, it makes a mapping of a model's inputs.
        """
        arguments.check("text", text, str | Sequence[str])
        if not isinstance(text, str):
            return [self.encode(each, image) for each in text]
        if image is not None:
            return self.codec.with_image(text, image)
        return np.asarray(self.codec.encode(text), np.int32)

    def decode(self, tokens: int | Sequence[int] | np.ndarray | jax.Array) -> str:
        """Decodes tokens `[T]`, or one token, to a text."""
        arguments.check("tokens", tokens, int | Sequence[int])
        array = np.atleast_1d(np.asarray(tokens))
        if array.ndim != 1:
            raise ValueError(f"tokens must be [T], got shape {array.shape}.")
        return self.codec.decode(array.tolist())

    @arguments.checked
    def examples(self, count: int = EXAMPLES) -> tasks.Example:
        """Makes a batch of the first held-out or, for a function, wrapped examples.

        It has B = `count` examples, or fewer if a wrapped function has fewer.
        """
        checks.positive_integer("count", count)
        if self.batches:
            return example_rows.joined(example_rows.first(self.batches, count))
        if not has_task(self):
            refuse(self, "examples", "has no task; pass examples to mh.wrap")
        indices, data = np.arange(count, dtype=np.int32), self.task.held_out_data
        return evaluation.held_out_batch(self.task, self.config.seed, data, indices)

    # --- Edits

    @arguments.checked
    def edited(self, edits: Mapping[Any, Callable]) -> Self:
        """Changes values at sites of the model, see `mh.edit`."""
        return self.replace(model=self.model.edited(edits))

    def ablated(self, *which: int | Sequence[Any]) -> Self:
        """Ablates heads: (layer, head), ...; or one, by two numbers.

        A layer has its number in the model; of an encoder-decoder, and of a model with
        towers, its number among all attention layers.

        Raises:
          ValueError: If there is no such layer or head.
          TypeError: If an argument is no pair of a layer and a head.
        """
        pairs: Any = which
        if arguments.fits(which, tuple[Sequence[tuple[int, int]]]):  # a list of heads
            pairs = which[0]
        elif arguments.fits(which, tuple[int, int]):
            pairs = [which]
        for pair in pairs:
            arguments.check("a head", pair, tuple[int, int])
        parts = parts_of(self)
        closed = [np.zeros(len(part.names), bool) for part in parts]
        for layer, head in pairs:
            index = part_index(parts, layer)
            checks.integer_in("head", head, 0, len(closed[index]) - 1)
            closed[index][head] = True
        names = [f"{part.path}/heads".removeprefix("/") for part in parts]
        return self.edited(heads.edits.without(names, closed))


if TYPE_CHECKING:

    class RunSubject(Subject):
        """A subject with a task: a run, or pretrained weights with a tokenizer."""

        config: configuration.RunConfig
        task: tasks.Task

else:  # the difference is only in the types of fields
    RunSubject = Subject


def refuse(subject: Subject, verb: str, why: str) -> NoReturn:
    """Raises ValueError with the reason why the subject does not support the verb."""
    raise ValueError(f"{verb} is not for {subject.name!r}, which {why}.")


def has_task(subject: Subject) -> TypeGuard[RunSubject]:
    """Checks whether the subject has a task, and therefore a config."""
    return subject.task is not None


def check_task(subject: Subject, verb: str) -> RunSubject:
    """Returns the subject; raises ValueError if it has no task."""
    if not has_task(subject):
        why = "has no task; a run, or weights with a tokenizer, has one"
        refuse(subject, verb, why)
    return subject


def check_parameters(subject: Subject, verb: str) -> None:
    """Raises ValueError if the model is more than its parameters."""
    if subject.model.edits:
        refuse(subject, verb, "has edits, which are not parameters")


def merged(params: Any, others: Any) -> Any:
    """Replaces the leaves of a tree that are not None in another."""
    return jax.tree.map(lambda x, y: x if y is None else y, params, others)


class Part(NamedTuple):
    """An attention part, and its heads."""

    path: str  # of its sites
    kind: str  # one of `models.KINDS`; "" if there is only one kind
    layer: int  # the number of its layer in the model, or in the stack of its kind
    names: tuple[int, ...]  # of its heads, as in the unpruned layer

    @property
    def address(self) -> str:
        """The name in a user's flag: "3", or "cross.3" where there are kinds."""
        return f"{self.kind}.{self.layer}" if self.kind else f"{self.layer}"


def some_inputs(subject: Subject) -> tasks.Example:
    """Returns a batch to trace a model on: of its own, or of eight tokens."""
    batches = subject.batches
    return batches[0] if batches else example_rows.some_tokens(subject.codec)


def parts_of(subject: Subject, batch: tasks.Example | None = None) -> list[Part]:
    """Lists the attention parts of a model; a function is traced to find them.

    It is traced on a batch, by default on one of its batches or on eight tokens.
    """
    model = subject.model
    if model.config is not None:
        heads_of_layers = models.heads_of_layers(model.config)
        return [Part(x.path, x.kind, x.layer, x.names) for x in heads_of_layers]
    if batch is None and not subject.batches and subject.codec.image_tokens:
        why = "may read pictures, by layers of their own.\nPass examples to mh.wrap"
        refuse(subject, "counting heads", why)
    arguments = model, subject.params, batch or some_inputs(subject)
    try:
        counts = model_runs.parts(*arguments)
    except Exception as error:
        if batch is not None or subject.batches:
            raise
        reason = " ".join(str(error).split())
        why = f"cannot be traced on tokens ({reason}).\nPass examples to mh.wrap"
        refuse(subject, "counting heads", why)
    kinds = model_runs.kinds_of(*arguments) or [""] * len(counts)
    by_kind = {
        x: [y for y, z in zip(counts, kinds, strict=True) if z == x] for x in kinds
    }
    numbers = itertools.chain(*map(model_runs.layer_numbers, by_kind.values()))
    left = [x.names for x in subject.left if x.names]
    if [*map(len, left)] != [*counts.values()]:  # not pruned, or with zeros
        left = [tuple(range(count)) for count in counts.values()]
    return [*map(Part, counts, kinds, numbers, left)]


def layers_of(parts: Sequence[Part]) -> tuple[Layer, ...]:
    """Makes the layers of a record of heads."""
    return tuple(
        Layer.of_model(x.kind, x.layer, i, x.names) for i, x in enumerate(parts)
    )


def part_index(parts: Sequence[Part], layer: Any, name: str = "layer") -> int:
    """Finds the attention part of a layer; see `Subject.ablated` for its number."""
    has_kinds = any(part.kind for part in parts)
    numbers = [i if has_kinds else part.layer for i, part in enumerate(parts)]
    checks.integer_in(name, layer, 0, max(numbers, default=0))
    if layer not in numbers:
        others = checks.listed([*map(str, numbers)])
        raise ValueError(f"layer {layer} has no attention; layers {others} have.")
    return numbers.index(layer)


class Verb(NamedTuple):
    """A question about a subject."""

    function: Callable[..., Any]  # of a subject and keyword options
    # Name of the command, `python -m mha_haiku COMMAND`, or "".
    command: str = ""
    folder: str = ""  # in the run's folder, for the files of the result


VERBS: dict[str, Verb] = {}  # by name
_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def verb(function: _Function) -> _Function: ...


@overload
def verb(
    *, command: str = "", folder: str = ""
) -> Callable[[_Function], _Function]: ...


def verb(
    function: Callable[..., Any] | None = None, *, command: str = "", folder: str = ""
) -> Callable[..., Any]:
    """Decorates a function to make it a method of every subject, and a command.

    The first parameter is the subject. An argument that does not fit the annotation of
    its parameter is refused. With `image=` a text becomes what `Subject.encode` makes;
    two images are of two texts, clean and corrupted. Flags of the command are the
    keyword options, and its help is the docstring. The result of a command has `text`
    and `save`, like a `records.Result`.

    Example:
      >>> @mh.verb
      ... def answer(subject, factor: int = 2) -> int:
      ...     "Returns a number."
      ...     return 21 * factor
      ...
      >>> mh.wrap(lambda params, x: x).answer(factor=3)
      63
    """
    if function is None:
        return functools.partial(verb, command=command, folder=folder)
    function = _reading(arguments.checked(function))
    VERBS[function.__name__] = Verb(function, command, folder)
    setattr(Subject, function.__name__, function)
    return function


_TEXTS = "inputs", "examples", "text", "clean", "corrupted"  # names of parameters


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a verb again with inputs that are constants, where a module reads them."""
    signature = inspect.signature(function)
    texts = [name for name in signature.parameters if name in _TEXTS]

    @functools.wraps(function)
    def method(subject: Subject, *args: Any, **options: Any) -> Any:
        if texts and (image := options.pop("image", None)) is not None:
            bound = signature.bind(subject, *args, **options)
            images = image if isinstance(image, tuple) else (image,) * len(texts)
            for name, each in zip(texts, images, strict=True):
                text = bound.arguments.get(name, "")
                bound.arguments[name] = subject.encode(text, each)
            args, options = bound.args[1:], bound.kwargs
        try:
            return function(subject, *args, **options)
        except torch_modules.ReadsInputsError as error:
            codec = subject.codec
            if codec.reads is None:
                raise
            codec.reads.append(str(error))
            batches = subject.batches and [codec.bound(x) for x in subject.batches]
            return function(subject.replace(batches=batches), *args, **options)

    return method
