"""Who could exchange an image, and what only root of another user's tree needs."""

import pytest
from checkfacts import dump, judged, process, restore, tree, verdict

UNSAFE = ("/srv/home belongs to user 1000", "/srv has mode 0777")


@pytest.mark.parametrize(
    ("name", "facts"),
    [("image-parent-safe", dump(unsafe_ancestors=UNSAFE)), ("image-safe", restore(unsafe_ancestors=UNSAFE))],
)
def test_the_whole_way_to_the_image_is_judged(name, facts):
    found = judged(name, facts)
    assert (found.verdict, found.blocks) == ("fail", True)
    assert all(words in found.found for words in UNSAFE)
    assert found.hint


def test_a_directory_of_another_user_blocks():
    assert judged("image-parent-safe", dump(image_parent_owner=1000)).blocks


OTHERS = tree(process(1010, uid=1000))


def test_a_tree_of_another_user_needs_cap_sys_resource():
    assert verdict("privilege", dump(OTHERS)) == "pass"
    assert verdict("privilege", dump(lacks_resource_capability=True)) == "pass"
    found = judged("privilege", dump(OTHERS, lacks_resource_capability=True))
    assert (found.verdict, found.status) == ("fail", 10)
    assert "CAP_SYS_RESOURCE" in found.found and "user 1000" in found.found
