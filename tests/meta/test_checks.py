"""The lists of checks: named once, named well."""

import re

import pytest

from gpuckpt import checks


@pytest.mark.parametrize("name", ["DUMP_CHECKS", "RESTORE_CHECKS"])
def test_ids_are_unique_and_can_be_typed(name):
    ids = [check.id for check in getattr(checks, name)]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one) for one in ids)


@pytest.mark.parametrize("name", ["DUMP_CHECKS", "RESTORE_CHECKS"])
def test_each_has_a_summary_for_the_manual_and_a_known_status(name):
    for check in getattr(checks, name):
        assert check.summary, check.id
        assert "\n" not in check.summary, check.id
        assert check.severity in ("note", "warn", "block"), check.id
        assert check.status in (10, 20, 21, 22), check.id
