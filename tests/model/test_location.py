"""user@host:path as scp writes it, and what is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuckpt.model.errors import UsageError
from gpuckpt.model.location import Location, parse


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("host:", Location("host", "")),
        ("host:/a b", Location("host", "/a b")),
        ("me@host:rel/x:y", Location("me@host", "rel/x:y")),
        ("me@[2001:db8::1]:/x", Location("me@2001:db8::1", "/x")),
        ("[::1]:", Location("::1", "")),
        ("ssh://me@host:2222/x", Location("me@host", "/x", 2222)),
        ("ssh://[::1]/x", Location("::1", "/x")),
        ("/a:b", None),
        ("./a:b", None),
        ("a/b:c", None),
        ("plain", None),
        ("", None),
        (":x", None),
    ],
)
def test_what_is_a_location(text, found):
    assert parse(text) == found
    if found is not None:
        assert parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["-oProxyCommand=x:/y", "a@-b:/x", "-a@b:/x", "ho st:/x", "h;x:/y", "$(x):/y", "ssh://h:0/x", "ssh://h:99999/x",
     "ssh://", "ssh:///x", "h:/a\0b", "[]:/x"],
)  # fmt: skip
def test_what_no_ssh_can_be_asked_for(text):
    with pytest.raises(UsageError):
        parse(text)


@given(st.text())
def test_any_text_is_a_location_a_path_or_refused(text):
    try:
        found = parse(text)
    except UsageError:
        return
    assert found is None or not found.host.startswith("-")
