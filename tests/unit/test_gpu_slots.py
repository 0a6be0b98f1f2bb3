from __future__ import annotations

import pytest
import torch

from baton.core.errors import Exhausted, Internal
from baton.engine.gpu.slots import Slots
from baton.engine.page_groups import make_pool
from baton.engine.page_pool import Lease, PagePool


def slots(count: int, width: int = 4) -> Slots:
    return Slots(count, width, torch.device("cpu"))


def leases(*sizes: int) -> list[Lease]:
    pool = PagePool(sum(sizes), page_size=16)
    return [pool.acquire(size) for size in sizes]


def test_only_new_pages_are_uploaded() -> None:
    table, (lease, spare) = slots(2), leases(2, 1)
    (slot,), first = table.place([lease])
    assert first.tolist() == [[slot * 4, 0], [slot * 4 + 1, 1]]
    assert table.place([lease])[1].tolist() == []
    spare.release()
    lease.extend(1)
    assert table.place([lease])[1].tolist() == [[slot * 4 + 2, 2]]


def test_a_slot_of_a_released_lease_is_taken_first() -> None:
    table, (first, second, third) = slots(2), leases(1, 1, 1)
    kept, given = table.place([first, second])[0]
    second.release()
    assert table.place([third])[0] == [given]
    assert table.place([first])[0] == [kept]


def test_the_one_not_used_for_the_longest_comes_next_and_is_uploaded_again() -> None:
    table, (first, second, third) = slots(2), leases(1, 1, 1)
    table.place([first, second])
    table.place([first])
    table.place([third])
    assert len(table.place([first])[1]) == 0
    assert len(table.place([second])[1]) == 1


def test_a_slot_under_a_step_is_never_taken() -> None:
    table, (first, second) = slots(1), leases(1, 1)
    table.place([first])
    first.pin()
    with pytest.raises(Exhausted):
        table.place([second])
    first.unpin()
    assert len(table.place([second])[1]) == 1


def test_a_sequence_longer_than_its_row_is_refused_and_changes_nothing() -> None:
    table, (long, short) = slots(2, width=2), leases(3, 1)
    with pytest.raises(Internal):
        table.place([short, long])
    assert len(table.place([short])[1]) == 1


def test_each_slice_of_the_layers_has_a_table_that_grows_by_itself() -> None:
    pool = make_pool(20, 4, (None, 5))
    table = Slots(2, 4, torch.device("cpu"), slices=2)
    lease = pool.acquire(3)
    lease.cover(1)
    (slot,), new = table.place([lease])
    assert dict(new.tolist()) == {
        slot * 8 + 4 * number + place: page
        for number, pages in enumerate(lease.tables)
        for place, page in enumerate(pages)
    }
    lease.cover(3)
    assert table.place([lease])[1].tolist() == [
        [slot * 8 + 5, lease.tables[1][1]],
        [slot * 8 + 6, lease.tables[1][2]],
    ]
    lease.advance(12)
    assert table.place([lease])[1].tolist() == []
    again = dict(Slots(2, 4, torch.device("cpu"), slices=2).place([lease])[1].tolist())
    assert min(again.values()) >= 0, "a page that was given back is no place to read from"
