"""Who could exchange an image, and what only root of another user's tree needs."""

from dataclasses import replace

import pytest
from checkfacts import dump, file, judged, process, restore, tree, verdict

from gpuckpt.model.manifest import GHOST_LIMIT_BYTES

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


def test_a_deleted_file_above_the_limit_blocks_by_what_is_allocated():
    limit = GHOST_LIMIT_BYTES
    fits = file("/tmp/a", deleted=True, links=0, blocks_bytes=limit, size=10 * limit)
    large = replace(fits, path="/tmp/b", blocks_bytes=limit + 512)
    linked = replace(large, path="/tmp/c", links=1)
    assert judged("deleted-files", dump(tree(files=(fits, linked)))).severity == "note"
    found = judged("deleted-files", dump(tree(files=(fits, large, linked))))
    assert found.blocks and "/tmp/b" in found.found and "/tmp/a" not in found.found
