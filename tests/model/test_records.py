"""The cheaper `dataclass` behaves as the standard one."""

import copy
import dataclasses
import pickle

import pytest

from gpuckpt.model import records

WRITTEN = """
@dataclass(frozen=True, slots=True)
class Thing:
    "What is compared."
    number: int
    names: tuple[str, ...] = ()
    secret: bytes = field(default=b"s", repr=False)
    table: dict[str, int] = field(default_factory=dict, compare=False)
    last: int = field(kw_only=True, default=3)

    def __post_init__(self):
        if self.number < 0:
            raise ValueError("below zero")
"""


def made_by(decorator):
    space = {"dataclass": decorator, "field": dataclasses.field, "__name__": __name__}
    exec(WRITTEN, space)
    return space["Thing"]


Thing = made_by(records.dataclass)


def said_by(act, *arguments):
    try:
        return act(*arguments)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "act",
    [
        lambda cls: repr(cls(1, ("a",), last=4)),
        lambda cls: (cls(1) == cls(1), cls(1) == cls(2), cls(1) != cls(1), cls(1) == (1,)),
        lambda cls: cls(1, table={"a": 1}) == cls(1),
        lambda cls: len({cls(1), cls(1), cls(2)}),
        lambda cls: cls(),
        lambda cls: cls(1, 2, 3, 4, 5),
        lambda cls: cls(1, other=2),
        lambda cls: cls(-1),
        lambda cls: setattr(cls(1), "number", 2),
        lambda cls: delattr(cls(1), "number"),
        lambda cls: dataclasses.asdict(dataclasses.replace(cls(1), names=("b",))),
        lambda cls: dataclasses.replace(cls(1), number=-1),
        lambda cls: (cls.__slots__, cls.__match_args__, hasattr(cls(1), "__dict__"), cls.__doc__),
        lambda cls: [(item.name, item.default, item.kw_only) for item in dataclasses.fields(cls)],
        lambda cls: cls(1).table is cls(1).table,
    ],
)
def test_it_does_what_the_standard_one_does(act):
    ours, standard = made_by(records.dataclass), made_by(dataclasses.dataclass)
    assert said_by(act, ours) == said_by(act, standard)
    assert said_by(act, ours) == said_by(act, standard), "also when one was made before"


def test_copies_are_equal():
    thing = Thing(1, ("a",), last=4)
    for again in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
        assert again == thing
        assert again is not thing


def test_nothing_is_added():
    with pytest.raises(dataclasses.FrozenInstanceError, match="other"):
        Thing(1).other = 2


def test_a_class_that_writes_its_own_is_left_alone():
    @records.dataclass(frozen=True, slots=True)
    class Own:
        number: int

        def __eq__(self, other):
            return True

        __hash__ = None

    assert Own(1) == Own(2)


def test_a_mutable_default_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match="mutable default"):

        @records.dataclass(frozen=True, slots=True)
        class Shared:
            items: list[int] = []  # noqa: RUF012
