"""`load`, `train` and `wrap`: a subject from a run, weights, a config or a function."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from mha_haiku import interop
from mha_haiku.core import arguments, checks, models, sites
from mha_haiku.interop import jax_modules, sources, torch_modules
from mha_haiku.lab import heads
from mha_haiku.subjects import (
    conversion,
    encoding,
    imported_runs,
    observers,
)
from mha_haiku.subjects.subject import Subject, merged
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training import tasks
from mha_haiku.training.runs import configuration, files, folders, loop


def load(
    source: str | os.PathLike,
    *,
    step: int | None = None,
    dtype: Any = None,
    trust: bool = False,
    check: bool = True,
) -> Subject:
    """Loads a trained model from a run, a file, a package or the hub.

    Args:
      source: The folder of a run; or, as in `interop.load`, a folder in the layout of
        the hub, a `.safetensors` or `.gguf` file, `package:NAME` of an installed
        package that holds either, or a name on the hub, `owner/name`. A family that
        has no table here is loaded by transformers, and wrapped.
      step: Checkpoint of a run. Defaults to the newest.
      dtype: Dtype of pretrained parameters. Defaults to float32.
      trust: Whether the Python file that a run names as its task may be executed;
        `show` and others then accept the folder, too. No other file has code.
      check: Whether to compare a model of transformers with torch, as in `wrap`.

    Raises:
      ConfigError: If there is no such model, or it cannot be read, or it needs
        `trust`.
      ValueError: If a dtype is given for a run, or a step for anything else.

    Example:
      >>> subject = mh.load("runs/reverse")
      >>> subject.task.name
      'reverse'
    """
    path, name = checks.as_path(source), os.fspath(source)
    if path.exists():
        name = path.resolve().name
    contents = files.read_json(folders.Folder(path).config) if path.is_dir() else None
    if contents is not None and "config" in contents:  # and not of other libraries
        if dtype is not None:
            raise ValueError(f"dtype must be None for a run, got {dtype!r}.")
        return Subject.of_folder(path, step, trust=trust)
    if step is not None:
        raise ValueError(f"step must be None: {name} is not a run, got {step!r}.")
    origin = sources.find(source)
    if name.startswith(sources.PACKAGE):  # packages have names of their own
        name = origin.title
    loaded = torch_modules.load(origin, dtype=dtype)
    if loaded is not None:
        module, tokenizer = loaded
        return wrap(module, tokenizer=tokenizer, name=name, check=check)
    imported = interop.load(origin, dtype=dtype)
    try:
        run = imported_runs.in_memory(imported, name)
    except checks.ConfigError:  # there is no task
        codec = encoding.of_tokenizer(imported.tokenizer)
        return Subject(imported.model, imported.params, name, codec=codec)
    return Subject.of_run(run, name)


def train(
    what: configuration.RunConfig | tasks.Task,
    workdir: str | os.PathLike,
    *,
    task: tasks.Task | None = None,
    steps: int | None = None,
    override_config: bool = False,
) -> Subject:
    """Trains a model, or resumes its run, and returns it as a subject.

    Next to what `runs.train` writes, the folder gets its attention maps, of which
    `show(workdir)` is the page, and what heads did while it trained, if the config asks
    for it. After an interrupt there are no maps; the same call resumes.

    Args:
      what: A task, such as `tasks.from_arrays` returns; or a whole config. A task means
        `runs.default_config(task)`.
      workdir: The run's folder.
      task: The task, instead of the one that a config describes.
      steps: Number of steps, instead of `config.training.steps`.
      override_config: Whether to resume even if the config differs from the run's.

    Raises:
      ConfigError: If the config, the folder or both together are not usable.
      NonFiniteLossError: If more steps in a row are nonfinite than the config allows.
      SaveError: If the last checkpoint cannot be written.
      TypeError: If both `what` and `task` are tasks.

    Example:
      >>> config = mh.load("runs/reverse").config
      >>> subject = mh.train(config, "runs/reverse")  # resumes what has not ended
      The run in runs/reverse has ended at step 30.
      >>> subject.step
      30
    """
    if isinstance(what, configuration.RunConfig):
        config = what
    elif task is None:
        config, task = configuration.default_config(what), what
    else:
        raise TypeError(f"what must be a config where task is given, got {type(what)}.")
    if steps is not None:
        config = config.replace(training=dict(steps=steps))
    summary = train_observed(
        config, workdir, task=task, override_config=override_config
    )
    if not summary.interrupted:
        dumps.dump(Subject.of_folder(workdir))
    return load(workdir)


def train_observed(
    config: configuration.RunConfig, workdir: str | os.PathLike, **options: Any
) -> loop.Summary:
    """Trains with the observer of the laboratory; otherwise as `runs.train`."""
    watching = [observers.Recorder(config.attention.record_every)]
    return loop.train(config, workdir, observers=watching, **options)


def wrap(
    function: Any,
    params: Any = None,
    tokenizer: Any = None,
    *,
    metric: heads.Metric | None = None,
    examples: Any = None,
    mask_probability: float = 0.0,
    name: str = "",
    check: bool = True,
) -> Subject:
    """Wraps any JAX function, or a module of PyTorch, Flax or Equinox, as a subject.

    Sites of a module are named after its submodules. A PyTorch module runs in JAX by
    torchax; a module of Equinox takes one example, and is mapped over batches. Inputs
    are its first argument, a mapping of its keywords or, for an encoder-decoder of
    transformers, a pair of source and target. A mapping may call a function's inputs
    "inputs", whatever their own name. `labels` in a mapping are the targets as in
    transformers: -100 does not count, and they are shifted by one position if the model
    predicts the next token, as functions are assumed to do. A function is traced once
    for each kind of inputs, as by `jax.jit`.

    Args:
      function: A function from parameters and inputs `[B, T, ...]` to logits; also by
        keyword `lengths`, where examples have lengths, and in training a key `rng`, if
        it takes one. Or a module of PyTorch, NNX or Equinox, or a bound one of Linen,
        which is not changed.
      params: Parameters of the function; a module has them itself.
      tokenizer: An object with `encode(text)` and `decode(tokens)`, such as the
        tokenizer of `interop.load` or of transformers; None if inputs are arrays.
      metric: A function from logits and examples to a number per example, the lower the
        better. Defaults to the loss of the targets.
      examples: Examples to measure importance and roles on: batches of examples, texts,
        whose next tokens are the targets, or a list of other inputs.
      mask_probability: Share of the tokens to hide behind the tokenizer's mask token,
        and to predict instead of the next ones; the same ones each time.
      name: Name of the subject. Defaults to the function's name.
      check: Whether a PyTorch module is run next to its trace, on the first inputs of
        each kind that a verb or `examples` has, and an error is raised where outputs,
        maps or gradients differ. See the verb `check`, which compares in any case.

    Raises:
      ConfigError: If function is a PyTorch module, and torchax is missing.
      TypeError: If function is neither, or the tokenizer lacks `encode` or `decode`.
      ValueError: If parameters are given for a module that has its own, or
        `mask_probability` without a mask token.

    Example:
      >>> def f(params, tokens):  # to logits [B, T, C]
      ...     return params["embedding"][tokens] @ params["embedding"].T
      ...
      >>> params = {"embedding": jax.random.normal(jax.random.key(0), (7, 4))}
      >>> mh.wrap(f, params).logits(np.array([[1, 2, 3]])).shape
      (1, 3, 7)
    """
    codec, is_function = encoding.of_tokenizer(tokenizer), callable(function)
    certifier = None
    checks.share("mask_probability", mask_probability)
    if mask_probability and codec.mask is None:
        raise ValueError("mask_probability needs a tokenizer with a mask token.")
    codec = codec._replace(mask_probability=mask_probability)
    is_torch, of_jax = torch_modules.is_module(function), jax_modules.convert(function)
    if params is not None and (is_torch or of_jax):
        kind = "torch.nn.Module" if is_torch else type(function).__name__
        raise ValueError(
            f"params must be None for a {kind}, which has its own, got "
            f"{type(params).__name__}; a tokenizer is given by tokenizer=."
        )
    if is_torch:
        module = torch_modules.convert(function)
        certifier = torch_modules.Certifier(module, is_strict=check)
        function, params = module.function, module.params
        read = {name: getattr(module, name) for name in module._fields[8:]}
        read["end_tokens"] = (*module.end_tokens, *codec.end_tokens)
        codec = codec._replace(**read)
        name = name or module.name
    elif not is_function:
        raise TypeError(
            "function must be a function from parameters and inputs to logits, or a "
            f"module of PyTorch, Flax or Equinox, got {type(function).__name__}."
        )
    else:
        if of_jax:
            function, params, fixed = of_jax
            codec = codec._replace(fixed=tuple(fixed))
        codec = codec._replace(names=_names_of_inputs(function))
    parameters = arguments.parameters_of(function)
    has_others = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    takes_lengths = has_others or "lengths" in parameters
    codec = codec._replace(knows_lengths=takes_lengths, parameters=tuple(parameters))
    # Modules of Equinox also have leaves such as activations; only arrays are traced.
    arrays = jax.tree.map(lambda x: x if sites.is_array(x) else None, params)

    @functools.wraps(function)
    def of_arrays(arrays: Any, inputs: Any, **options: Any) -> Any:
        if not takes_lengths and {"lengths", "decoder_lengths"} & options.keys():
            raise ValueError(
                f"inputs must be of one length each call: {model.description} takes no "
                "lengths=, by which padding is known."
            )
        return function(merged(params, arrays), inputs, **options)

    model = models.of_function(of_arrays)
    subject = Subject(
        model,
        arrays,
        name or model.description,
        codec=codec,
        metric=metric or heads.metrics.loss,
        certifier=certifier,
        module=certifier and certifier.module.original,
    )
    if examples is None:
        return subject
    batches = conversion.batches(subject, examples, targets=True, required=False)
    return subject.replace(batches=batches)


def _names_of_inputs(function: Callable) -> tuple[str, ...]:
    """Lists what a mapping may call the inputs, which come after the parameters."""
    by_place = [
        name
        for name, x in arguments.parameters_of(function).items()
        if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    return tuple(dict.fromkeys(["inputs", *by_place[1:2]]))
