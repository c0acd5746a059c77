"""What a claim is: a sentence of a paper, how it is measured, and what decides it."""

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
"""Where a bound can be from."""

VERDICT_SEED, SECOND_SEED = 100, 200
"""The first seeds of the verdict and of the second one; lower ones are pilots."""

Numbers = Mapping[str, float]


class Source(NamedTuple):
    """Where a claim was made.

    Attributes:
      paper: "Olsson et al. 2022".
      place: The table, figure or section.
      published: What is written there, with its number if there is one. Where nobody
        has looked it up in the paper, it says "from memory".
      arxiv: The paper's number there, "2209.11895"; "": it is in no such place.
      link: Where it is instead; "": nowhere.
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
    the control makes the effect vanish, the number must be on the other side: take "how
    much better than a window", not "how bad is a window".

    Attributes:
      name: What the number is, for people: "accuracy, attention minus window".
      of: The number: its name among those that `Claim.measure` returns, or a function
        of them all.
      at_least: The bound below; None: there is none. One of the two is given.
      at_most: The bound above.
      unit: "" for shares and other numbers without one; else "nats", "steps", ...
      bound_from: One of `BOUNDS`. A bound is from the paper if the paper gives it, or
        if it says in words which side of `null` the number lies on, and the bound is
        `null`. It is half of the paper's effect if it lies half-way between `null` and
        the published number that is closest to `null`.
      null: The number where there is no effect.
      published: The same number in the paper, by where it stands there; {}: the paper
        has none. The criterion holds for all of them.
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
        """Returns the criterion's number, of all those that were measured."""
        return float(self.of(numbers) if callable(self.of) else numbers[self.of])

    @property
    def bound(self) -> float:
        """The one of the two bounds that is given."""
        return self.at_least if self.at_most is None else self.at_most

    def holds(self, value: float) -> bool:
        """Returns whether a number is on the right side of the bound."""
        return value >= self.bound if self.at_most is None else value <= self.bound


class Before(NamedTuple):
    """What an earlier design of a claim said.

    Attributes:
      verdict: The verdict then, one of `verdicts.WORDS`.
      why: What was wrong with the design, and what is measured instead.
    """

    verdict: str
    why: str


class Curve(NamedTuple):
    """Lines for the claim's figure, made of measured numbers.

    Attributes:
      title: What is seen.
      across: The label of the horizontal axis, with its unit.
      up: That of the vertical axis.
      points: The places on the horizontal axis.
      lines: By the name of a line, its number at each point, as a template of the
        names that `Claim.measure` returns: "accuracy of attention at {}".
      logarithmic: Whether the horizontal axis is.
      level: A number to draw a dotted line at, as chance.
      level_name: What it is.
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
    """Returns the config of a task, evaluated and saved after its last step alone."""
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
    """What is claimed, in a line that stands alone: the title of the figure."""
    source: ClassVar[Source]
    control: ClassVar[str]
    """What the control is, in a few words: "one layer"."""
    planted: ClassVar[str]
    """What is planted in the control, in a few words: "one layer with smeared keys"."""
    criteria: ClassVar[tuple[Criterion, ...]]
    """All hold: reproduced; some: partly; none: not reproduced."""
    effect: ClassVar[str]
    """The size of the effect, as words for `str.format` with the criteria's numbers:
    "the window costs {0} nats, of which the first four tokens bring back {1}"."""
    would_change: ClassVar[str]
    """What would change the verdict, as a sentence or two."""
    before: ClassVar[Before | None] = None
    """What an earlier design said; None: there was none."""
    curves: ClassVar[tuple[Curve, ...]] = ()
    """What the figure shows in addition to the criteria."""
    seeds: ClassVar[int] = 3
    """How many are measured: 3, or 6 where the pilot says that three cannot decide."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages to import that not everybody has, such as a pretrained model."""
    version: ClassVar[int] = 1
    """One more whenever `measure` computes something else: all is measured anew."""
    tried: ClassVar[str] = ""
    """What falls short and what was tried, as sentences; "": nothing does."""

    def __init_subclass__(cls, **options: Any):
        """Gives the class the name of its file."""
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__module__.rpartition(".")[2]

    @property
    def verdict_seeds(self) -> range:
        """The seeds that the verdict is of."""
        return range(VERDICT_SEED, VERDICT_SEED + self.seeds)

    @property
    def second_seeds(self) -> range:
        """Other seeds, on which the verdict must be the same."""
        return range(SECOND_SEED, SECOND_SEED + self.seeds)

    def configs(self, arm: str) -> dict[str, runs.RunConfig]:
        """Returns the configs that `measure` trains, by names of its own; {}: none.

        A change in one of them makes the desk measure again. Seeds are the desk's.
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
