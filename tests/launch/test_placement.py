"""Who gets which cores."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleuve.launch.placement import Place, place


def test_two_cores_are_one_for_the_trainer_and_one_for_the_worker() -> None:
    placement = place("disaggregated", [0, 1], workers=1)
    assert placement.trainer == Place(frozenset({0}), 1)
    assert placement.workers == (Place(frozenset({1}), 1),)


def test_colocated_gives_everyone_every_core_in_turn() -> None:
    placement = place("colocated", [0, 1], workers=1)
    assert placement.trainer == placement.workers[0] == Place(frozenset({0, 1}), 2)


def test_colocated_workers_share_the_cores_among_themselves() -> None:
    placement = place("colocated", [0, 1, 2, 3], workers=2)
    assert placement.trainer == Place(frozenset({0, 1, 2, 3}), 4)
    assert placement.workers == (Place(frozenset({0, 1}), 2), Place(frozenset({2, 3}), 2))


def test_given_threads_are_given_cores_and_the_rest_is_shared() -> None:
    placement = place("disaggregated", range(8), workers=2, trainer_threads=4)
    assert placement.trainer == Place(frozenset({0, 1, 2, 3}), 4)
    assert placement.workers == (Place(frozenset({4, 5}), 2), Place(frozenset({6, 7}), 2))


def test_fewer_cores_than_processes_leaves_them_floating_on_one_thread() -> None:
    placement = place("disaggregated", [0, 1], workers=3)
    assert placement.trainer == Place(None, 1)
    assert placement.workers == (Place(None, 1),) * 3


counts = st.integers(0, 6)


@given(cores=st.sets(st.integers(0, 63), min_size=1), workers=st.integers(1, 6), of_worker=counts, of_trainer=counts)
def test_disaggregated_sets_are_disjoint_nonempty_and_of_the_given_cores(
    cores: set[int], workers: int, of_worker: int, of_trainer: int
) -> None:
    placement = place("disaggregated", sorted(cores), workers, of_worker, of_trainer)
    places = [placement.trainer, *placement.workers]
    assert len(places) == workers + 1
    assert all(p.threads >= 1 for p in places)
    if len(cores) <= workers:
        assert all(p.cpus is None for p in places)
    else:
        sets = [p.cpus for p in places if p.cpus]
        assert len(sets) == workers + 1
        assert sum(map(len, sets)) == len(frozenset().union(*sets)) <= len(cores)
        assert frozenset().union(*sets) <= cores
    if of_worker:
        assert all(p.threads == of_worker for p in placement.workers)


def test_each_rank_of_the_trainer_has_cores_of_its_own() -> None:
    placement = place("disaggregated", range(4), workers=1, ranks=3)
    assert placement.ranks == tuple(Place(frozenset({core}), 1) for core in range(3))
    assert placement.workers == (Place(frozenset({3}), 1),)


def test_colocated_ranks_share_the_cores_among_themselves_and_so_do_the_workers() -> None:
    placement = place("colocated", range(4), workers=1, ranks=2)
    assert placement.ranks == (Place(frozenset({0, 1}), 2), Place(frozenset({2, 3}), 2))
    assert placement.workers == (Place(frozenset(range(4)), 4),)
