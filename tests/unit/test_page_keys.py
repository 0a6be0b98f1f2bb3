from __future__ import annotations

from baton.core.page_keys import KEY_BYTES, PageNaming, page_keys, salted_root
from baton.engine.page_groups import make_pool

ROOT = salted_root(b"model and layout", "")
TOKENS = list(range(40))


def test_only_full_pages_have_keys() -> None:
    assert [len(page_keys(ROOT, TOKENS[:n], 16)) for n in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]
    assert {len(key) for key in page_keys(ROOT, TOKENS, 16)} == {KEY_BYTES}


def test_a_longer_prompt_starts_with_the_same_keys() -> None:
    whole = page_keys(ROOT, TOKENS, 8)
    assert page_keys(ROOT, TOKENS[:24], 8) == whole[:3]
    assert page_keys(whole[1], TOKENS[16:], 8) == whole[2:]


def test_a_page_is_named_by_all_tokens_before_it_too() -> None:
    changed = [99, *TOKENS[1:]]
    assert not set(page_keys(ROOT, changed, 8)) & set(page_keys(ROOT, TOKENS, 8))


def test_other_salts_roots_and_adapters_share_nothing() -> None:
    roots = [ROOT, salted_root(b"model and layout", "a"), salted_root(b"another", "")]
    roots += [salted_root(b"model and layout", salt, b"digest") for salt in ("", "a")]
    roots += [salted_root(b"model and layout", "", b"other digest")]
    names = [key for root in roots for key in page_keys(root, TOKENS, 8)]
    assert len(set(names)) == len(names)


def test_every_token_id_that_the_wire_carries_has_a_name() -> None:
    assert page_keys(ROOT, [2**32 - 1, 2**31], 1) != page_keys(ROOT, [0, 2**31], 1)


def test_routers_and_workers_name_the_pages_of_an_adapter_alike() -> None:
    pool = make_pool(4, 8, (None,))
    pool.root = b"model and layout"
    for adapter in (b"", b"digest"):
        keys = PageNaming(pool.root, 8).keys(TOKENS, "salt", adapter)
        assert pool.chain("salt", adapter).keys(TOKENS, len(TOKENS)) == keys
