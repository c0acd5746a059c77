"""What a claim is: a sentence of a paper, how it is measured, and what decides it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mha_haiku.training import runs

if TYPE_CHECKING:
    from experiments.claims.desk import Desk, Trained

ARMS = ("claim", "control")
Numbers = Mapping[str, float]


class Source(NamedTuple):
    """Where a claim was made.

    Attributes:
      paper: "Olsson et al. 2022".
      place: The table, figure or section.
      published: What is written there, with its number if there is one. What nobody
        has looked up in the paper says so here: "from memory".
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

    Write the bound from the paper's words before the first measurement, and leave it.
    Where the control makes the effect vanish, the number must be on the other side:
    take "how much better than a window", not "how bad is a window".

    Attributes:
      name: What the number is, for people: "accuracy, attention minus window".
      of: The number: its name among those that `Claim.measure` returns, or a function
        of them all.
      at_least: The bound below; None: there is none. One of the two is given.
      at_most: The bound above.
      unit: "" for shares and other numbers without one; else "nats", "steps", ...
      published: The same number in the paper, where it has one.
    """

    name: str
    of: str | Callable[[Numbers], float]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    published: float | None = None

    def value(self, numbers: Numbers) -> float:
        """Returns the criterion's number, of all those that were measured."""
        return float(self.of(numbers) if callable(self.of) else numbers[self.of])

    @property
    def bound(self) -> float:
        """The one of the two bounds that is given."""
        return self.at_least if self.at_most is None else self.at_most


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

    One subclass per file, found by the name of the file. Each number is measured in two
    arms: "claim", as the paper has it, and "control", in which the effect must vanish.
    """

    name: ClassVar[str]
    """The file's name, without `.py`; set by itself."""
    sentence: ClassVar[str]
    """What is claimed, in a line that stands alone: the title of the figure."""
    source: ClassVar[Source]
    control: ClassVar[str]
    """What the control is, in a few words: "one layer"."""
    criteria: ClassVar[tuple[Criterion, ...]]
    """All hold: reproduced; some: partly; none: not."""
    curves: ClassVar[tuple[Curve, ...]] = ()
    """What the figure shows in addition to the criteria."""
    seeds: ClassVar[int] = 3
    """How many are measured; six where three left a criterion undecided, once."""
    minutes: ClassVar[float]
    """About, of all seeds with the control, on two idle cores."""
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

    def configs(self, arm: str) -> dict[str, runs.RunConfig]:
        """Returns the configs that `measure` trains, by names of its own; {}: none.

        A change in one of them makes the desk measure again. Seeds are the desk's.
        """
        return {}

    def measure(self, desk: "Desk", seed: int, arm: str) -> dict[str, float]:
        """Returns the numbers of one seed, by names, which are the same in both arms.

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
