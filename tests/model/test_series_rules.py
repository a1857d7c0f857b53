"""Names and rules of a series: pure functions, many cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuckpt.model import series
from gpuckpt.model.series import File, Going, Member, MinFree, Rules, Space

DAY = 86400.0
NOW = 1_796_000_000.0
PLENTY = Space(free_bytes=100, total_bytes=1000)


def member(number: int, *, age: float = 0.0, files=None, full: float = NOW) -> Member:
    return Member(series.member_name("job", NOW + number), NOW - age, full, files or {})


# Names


@pytest.mark.parametrize("text", ["job", "a", "train.py", "python3-42", "llm@gpu07", "modèle", "_x", "x" * 100])
def test_names_that_are_names(text):
    assert series.is_name(text)


@pytest.mark.parametrize(
    "text", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "a\nb", "x" * 101, "a\0", "\udcff", "é" * 101]
)
def test_names_that_are_none(text):
    assert not series.is_name(text)


@pytest.mark.parametrize(
    ("comm", "expected"),
    [
        ("python3", "python3-42"),
        ("a b/c", "a_b_c-42"),
        ("..", "process-42"),
        ("", "process-42"),
        ("VLLM::Engine", "VLLM__Engine-42"),
        ("\udcff\udcfe", "__-42"),
        ("-x", "x-42"),
    ],
)
def test_a_default_name_is_a_name(comm, expected):
    assert series.default_name(comm, 42) == expected
    assert series.is_name(expected)


@settings(deadline=None)
@given(st.text(max_size=15))
def test_any_program_has_a_default_name(comm):
    assert series.is_name(series.default_name(comm, 4194303))


@settings(deadline=None)
@given(st.from_regex(r"\A[a-z][a-z0-9.@+-]{0,20}\Z"), st.integers(0, 253402300799))
def test_what_is_named_is_parsed(name, seconds):
    assert series.parse(series.member_name(name, seconds)) == (name, float(seconds))


@pytest.mark.parametrize(
    "name",
    ["latest", "job", "job-2026", "job-20261330T000000Z", "job-20261130T240000Z", "-20261130T000000Z",
     "job-20261130T140526Z.partial", "job-20261130T140526Z2", "job20261130T140526Z", ".job.lock"],
)  # fmt: skip
def test_other_names_are_no_images_of_a_series(name):
    assert series.parse(name) is None


def test_a_name_can_hold_a_stamp_itself():
    assert series.parse("a-20261130T140526Z-20261130T140527Z") == ("a-20261130T140526Z", 1796047527.0)


def test_names_count_on_where_the_clock_was_set_back_or_stands_still():
    assert series.next_name("job", [], NOW) == "job-20261130T005320Z"
    assert series.next_name("job", ["job-20261130T005320Z"], NOW) == "job-20261130T005321Z"
    assert series.next_name("job", ["job-20270101T000000Z"], NOW) == "job-20270101T000001Z"
    assert series.next_name("job", ["job-20270101T000000Z.partial"], NOW) == "job-20270101T000001Z"
    assert series.next_name("job", ["other-20270101T000000Z", "latest", "job-x"], NOW) == "job-20261130T005320Z"


def test_no_name_comes_after_the_last_of_all():
    with pytest.raises(series.ClockAtEnd):
        series.next_name("job", ["job-99991231T235959Z"], NOW)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2_000_000_000), max_size=8), st.integers(0, 2_000_000_000))
def test_a_new_name_sorts_last_and_is_free(stamps, now):
    taken = [series.member_name("job", stamp) for stamp in stamps]
    fresh = series.next_name("job", taken, now)
    assert fresh not in taken
    assert max([*taken, fresh]) == fresh


# A full image now and then


@pytest.mark.parametrize(
    ("written", "due"),
    [
        (NOW - 6 * DAY, False),
        (NOW - 7 * DAY, True),
        (NOW, False),
        (NOW + DAY, False),
        (NOW + 30 * DAY, True),
        (0.0, True),
    ],
)
def test_a_full_image_is_due_by_the_age_of_the_last_one(written, due):
    assert series.full_is_due(member(1, full=written), 7 * DAY, NOW) is due


# Rules


def ages(*days: float) -> list[Member]:
    """Images of these ages in days, oldest first."""
    return [member(number, age=day * DAY) for number, day in enumerate(days)]


def gone(members, rules, space=PLENTY, now=NOW, untouchable=()):
    found = series.going(members, rules, space, now, frozenset(untouchable))
    return [[one.name for one in members].index(name) for name in found.names]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(), []),
        (Rules(keep=3), [0, 1]),
        (Rules(keep=1), [0, 1, 2, 3]),
        (Rules(keep=9), []),
        (Rules(keep_within_seconds=2 * DAY), [0, 1]),
        (Rules(keep_within_seconds=0.5), [0, 1, 2, 3]),
        (Rules(keep=1, keep_within_seconds=2 * DAY), [0, 1]),
        (Rules(keep=4, keep_within_seconds=DAY), [0]),
        (Rules(min_free=MinFree(bytes=50)), []),
    ],
)
def test_keep_and_keep_within_are_a_union(rules, expected):
    assert gone(ages(5, 4, 2, 1, 0), rules) == expected


def test_the_newest_stays_however_old_it_is():
    assert gone(ages(30, 20), Rules(keep_within_seconds=DAY)) == [0]
    assert gone(ages(30), Rules(keep_within_seconds=DAY)) == []
    assert gone([], Rules(keep=1)) == []


def test_an_image_from_the_future_is_not_old():
    assert gone(ages(-400, 0), Rules(keep_within_seconds=DAY)) == []


def test_an_image_in_use_stays_and_takes_nobodys_place():
    members = ages(5, 4, 3, 2, 1)
    assert gone(members, Rules(keep=2), untouchable=[members[1].name]) == [0, 2]
    assert gone(members, Rules(keep=2), untouchable=[members[0].name, members[2].name]) == [1]


def own(number: int, size: int) -> dict:
    return {(1, number): File(size, 1, 1)}


def chain(*sizes: int, shared: int = 0) -> list[Member]:
    """Images with some bytes of their own, and one pack that all of them have."""
    pack = {(1, 999): File(shared, 1, len(sizes))} if shared else {}
    return [member(number, files={**own(number, size), **pack}) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("wanted", "expected"), [(100, []), (101, [0]), (110, [0]), (111, [0, 1]), (130, [0, 1, 2]), (140, [0, 1, 2])]
)
def test_the_oldest_go_until_enough_is_free(wanted, expected):
    assert gone(chain(10, 10, 10, 10), Rules(min_free=MinFree(bytes=wanted))) == expected


def test_what_cannot_be_reached_is_said():
    rules = Rules(min_free=MinFree(bytes=500))
    assert series.going(chain(10, 10, 10), rules, PLENTY, NOW).missing_bytes == 380
    assert series.going(chain(10, 10), Rules(min_free=MinFree(bytes=100)), PLENTY, NOW) == Going()


def test_a_share_of_the_disk():
    assert gone(chain(10, 10, 10), Rules(min_free=MinFree(share=0.11))) == [0]
    assert MinFree(share=0.1).of(1000) == 100


def test_only_bytes_that_nobody_shares_count():
    """The pack that all have stays with the newest: only what each has alone is gained."""
    members = chain(10, 10, 10, shared=10_000)
    assert gone(members, Rules(min_free=MinFree(bytes=115))) == [0, 1]
    assert series.going(members, Rules(min_free=MinFree(bytes=5000)), PLENTY, NOW).missing_bytes == 4880


def test_a_pack_of_two_is_free_when_both_have_gone():
    pack = {(1, 7): File(100, 1, 2)}
    members = [member(0, files=pack), member(1, files=pack), member(2), member(3)]
    assert gone(members, Rules(min_free=MinFree(bytes=150))) == [0, 1]
    assert series.gain(members[:1]) == 0
    assert series.gain(members[:2]) == 100


def test_images_whose_going_gains_nothing_stay():
    members = [member(0, files=own(0, 10)), member(1), member(2), member(3)]
    assert gone(members, Rules(min_free=MinFree(bytes=5000))) == [0]


def test_min_free_comes_last_and_counts_what_the_others_free():
    members = chain(20, 20, 20, 20)
    assert gone(members, Rules(keep=3, min_free=MinFree(bytes=115))) == [0]
    assert gone(members, Rules(keep=3, min_free=MinFree(bytes=125))) == [0, 1]
    assert gone(members, Rules(keep_within_seconds=DAY, min_free=MinFree(bytes=125))) == [0, 1]


def test_a_file_with_two_names_in_one_image_is_counted_once():
    assert series.gain([member(0, files={(1, 1): File(100, 2, 2)})]) == 100


some_inodes = st.lists(st.builds(File, st.integers(0, 50), st.just(1), st.integers(1, 4)), min_size=7, max_size=7)
some_chains = st.lists(st.tuples(st.floats(-10, 400), st.sets(st.integers(0, 6), max_size=4)), max_size=8)
"""Of each image its age, and which of the inodes it has; an inode is as large in one as in the other."""
some_members = st.builds(
    lambda inodes, found: [
        member(n, age=age * DAY, files={(1, number): inodes[number] for number in sorted(chosen)})
        for n, (age, chosen) in enumerate(found)
    ],
    some_inodes,
    some_chains,
)
some_rules = st.builds(
    Rules,
    st.none() | st.integers(1, 6),
    st.none() | st.floats(0, 400 * DAY),
    st.none() | st.builds(MinFree, st.integers(0, 400), st.floats(0, 1)),
)


@settings(deadline=None)
@given(some_members, some_rules, st.sets(st.integers(0, 7)), st.builds(Space, st.integers(0, 300), st.just(500)))
def test_what_holds_whatever_the_rules_are(members, rules, busy, space):
    untouchable = frozenset(members[number].name for number in busy if number < len(members))
    found = series.going(members, rules, space, NOW, untouchable)
    left = [one for one in members if one.name not in found.names]
    assert list(found.names) == sorted(set(found.names)), "oldest first, each once"
    assert not members or members[-1] in left, "the newest survives"
    assert not untouchable & set(found.names), "one in use never goes"
    if rules.keep is None and rules.keep_within_seconds is None and rules.min_free is None:
        assert left == members
    if rules.min_free is None:
        counted = members[-rules.keep :] if rules.keep is not None else []
        within = rules.keep_within_seconds
        young = [one for one in members if within is not None and NOW - one.created <= within]
        assert all(one in left for one in (*counted, *young))
    elif found.missing_bytes:
        freed = series.gain(one for one in members if one.name in found.names)
        assert space.free_bytes + freed + found.missing_bytes == rules.min_free.of(space.total_bytes)


@settings(deadline=None)
@given(some_members, some_rules, st.builds(Space, st.integers(0, 300), st.just(500)))
def test_pruning_twice_is_pruning_once(members, rules, space):
    found = series.going(members, rules, space, NOW)
    freed = series.gain(one for one in members if one.name in found.names)
    left = [one for one in members if one.name not in found.names]
    if not any(one.files for one in members):  # links of what is left are not counted down here
        assert series.going(left, rules, Space(space.free_bytes + freed, 500), NOW).names == ()


# Copies


@pytest.mark.parametrize(
    ("packs", "expected"),
    [
        ([], []),
        ([{1}], [1]),
        ([{1}, {1, 2}, {2}], [1, 1, 1]),
        ([{1}, {1}, {5}, {5}], [1, 1, 2, 2]),
        ([{1}, {2}, {1, 2}], [1, 1, 1]),
        ([{1}, {2}, {3}], [1, 2, 3]),
    ],
)
def test_copies_are_images_that_share_nothing(packs, expected):
    assert series.copies([{(1, inode): File(1, 1, 1) for inode in one} for one in packs]) == expected
