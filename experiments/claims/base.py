"""Claims: a sentence of a paper, its measurement, and the criteria that decide it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mha_haiku.training import runs

if TYPE_CHECKING:
    from experiments.claims.desk import Desk, Trained

ARMS = ("claim", "control")
PLANTED = "planted"
"""A third arm, of one seed: the control with a failure planted, which it must show."""

PAPER, HALF, OURS = "the paper", "half of the paper's effect", "ours"
BOUNDS = (PAPER, HALF, OURS)
"""The possible origins of a bound."""

VERDICT_SEED, SECOND_SEED = 100, 200
"""The first seeds of the verdict and of the second one; lower ones are pilots."""

Numbers = Mapping[str, float]


class Source(NamedTuple):
    """Where a claim was made.

    Attributes:
      paper: "Olsson et al. 2022".
      place: The table, figure or section.
      published: The published statement, with its number if there is one. It says "from
        memory" if it was not checked in the paper.
      arxiv: The paper's number on arXiv, "2209.11895", or "".
      link: An address of a paper that is not on arXiv, or "".
    """

    paper: str
    place: str
    published: str
    arxiv: str = ""
    link: str = ""

    @property
    def url(self) -> str:
        """The paper's page; "" if it has none."""
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else self.link


class Criterion(NamedTuple):
    """One number that must lie on one side of a bound, for the claim to hold.

    Choose the bound from the paper before the first measurement, and leave it. Where
    the control makes the effect vanish, the number must be on the other side: measure
    "how much better than a window", not "how bad is a window".

    Attributes:
      name: A description of the number: "accuracy, attention minus window".
      of: The number: a name in the result of `Claim.measure`, or a function of the
        whole result.
      at_least: The lower bound, or None. Pass either this or `at_most`.
      at_most: The upper bound.
      unit: "nats", "steps", ..., or "" for shares and other numbers without a unit.
      bound_from: One of `BOUNDS`. A bound is from the paper if the paper gives it, or
        if it says in words which side of `null` the number lies on, and the bound is
        `null`. It is half of the paper's effect if it lies half-way between `null` and
        the published number that is closest to `null`.
      null: The number without an effect.
      published: The same number in the paper, by its place there; {} if the paper has
        none. The criterion holds for all of them.
    """

    name: str
    of: str | Callable[[Numbers], float]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    bound_from: str = OURS
    null: float = 0.0
    published: Mapping[str, float] = {}

    def value(self, numbers: Numbers) -> float:
        """Computes the criterion's number from the measured numbers."""
        return float(self.of(numbers) if callable(self.of) else numbers[self.of])

    @property
    def bound(self) -> float:
        """The lower bound, or else the upper one."""
        return self.at_least if self.at_most is None else self.at_most

    def holds(self, value: float) -> bool:
        """Returns whether a number is on the right side of the bound."""
        return value >= self.bound if self.at_most is None else value <= self.bound


class Before(NamedTuple):
    """The verdict of an earlier design of a claim.

    Attributes:
      verdict: The verdict, one of `verdicts.WORDS`.
      why: The fault of that design, and what is measured instead.
    """

    verdict: str
    why: str


class Curve(NamedTuple):
    """Lines for the claim's figure, made of measured numbers.

    Attributes:
      title: Title of the panel.
      across: Label of the horizontal axis, with its unit.
      up: Label of the vertical axis.
      points: Places on the horizontal axis.
      lines: By the name of a line, its number at a point, as a template of the names
        that `Claim.measure` returns: "accuracy of attention at {}".
      logarithmic: Whether the horizontal axis is logarithmic.
      level: The height of a dotted line, such as chance.
      level_name: Name of that level.
    """

    title: str
    across: str
    up: str
    points: Sequence[float]
    lines: Mapping[str, str]
    logarithmic: bool = False
    level: float | None = None
    level_name: str = ""


def config(task: str, steps: int, **training: Any) -> runs.RunConfig:
    """Returns the config of a task, evaluated and saved only after its last step."""
    return runs.default_config(task).replace(
        training=dict(
            steps=steps, evaluate_every=steps, checkpoint_every=steps, **training
        )
    )


class Claim:
    """A published claim, tested on several seeds and against a control.

    One subclass per file, found by the name of the file; its docstring says what is
    trained and measured. Each number is measured in two arms: "claim", as the paper has
    it, and "control", in which the effect must vanish. A third arm, "planted", is the
    control with a failure planted: there each criterion must hold, which shows that the
    control could have failed.
    """

    name: ClassVar[str]
    """The file's name, without `.py`; set by itself."""
    sentence: ClassVar[str]
    """The claim in one self-contained line: the title of the figure."""
    source: ClassVar[Source]
    control: ClassVar[str]
    """The control, in a few words: "one layer"."""
    planted: ClassVar[str]
    """The failure planted in the control: "one layer with smeared keys"."""
    criteria: ClassVar[tuple[Criterion, ...]]
    """All hold: reproduced; some: partly; none: not reproduced."""
    effect: ClassVar[str]
    """The size of the effect, as words for `str.format` with the criteria's numbers:
    "the window costs {0} nats, of which the first four tokens bring back {1}"."""
    would_change: ClassVar[str]
    """A result that would change the verdict, in a sentence or two."""
    before: ClassVar[Before | None] = None
    """The verdict of an earlier design, or None."""
    curves: ClassVar[tuple[Curve, ...]] = ()
    """Panels of the figure in addition to the criteria."""
    seeds: ClassVar[int] = 3
    """Number of seeds: 3, or 6 if the pilot says that three cannot decide. A verdict of
    three that is close to a bound becomes a verdict of six, see `verdicts.is_close`."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Optional packages to import, such as a pretrained model."""
    version: ClassVar[int] = 1
    """Raise this when `measure` changes: then everything is measured again."""
    tried: ClassVar[str] = ""
    """Sentences on what falls short and what was tried, or ""."""

    def __init_subclass__(cls, **options: Any):
        """Gives the class the name of its file."""
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__module__.rpartition(".")[2]

    def configs(self, arm: str) -> dict[str, runs.RunConfig]:
        """Returns the configs that `measure` trains, by names that the claim chooses.

        A change in one of them makes the desk measure again. The desk sets the seeds.
        """
        return {}

    def measure(self, desk: "Desk", seed: int, arm: str) -> dict[str, float]:
        """Returns the numbers of one seed, by names, which are the same in all arms.

        Trains every config with the seed, and joins what `of_trained` returns for each.
        """
        numbers = {}
        for name, config in self.configs(arm).items():
            numbers |= self.of_trained(desk, desk.train(config, seed), name, arm)
        return numbers

    def of_trained(
        self, desk: "Desk", trained: "Trained", name: str, arm: str
    ) -> dict[str, float]:
        """Returns the numbers of one trained config, given its name in `configs`.

        A claim defines this, or overrides `measure`.
        """
        raise NotImplementedError
