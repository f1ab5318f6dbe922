"""The order of views: complete, paired, and independent of how the batch is divided."""

import numpy as np
import pytest

from infvit.data import TrainSampler, View
from infvit.errors import ConfigError, DataError

N = 50


def batches(sampler: TrainSampler, epoch: int, update: int = 0) -> list[list[View]]:
    sampler.start(epoch, update)
    expected, out = len(sampler), list(sampler)
    assert len(out) == expected
    return out


def reference(batch_size: int, repeats: int = 1, epoch: int = 0) -> list[View]:
    """The views of an epoch by position, before they are laid out in micro-batches."""
    sampler = TrainSampler(N, batch_size, None, repeats, seed=7)
    order, seeds = sampler._epoch(epoch)
    return [View(int(i), int(s)) for i, s in zip(order, seeds, strict=True)]


LAYOUTS = [(8, None, 1), (8, 4, 1), (8, 6, 1), (8, 2, 2), (8, 4, 2), (8, None, 4), (12, 4, 3), (24, 10, 2), (48, 14, 4)]


@pytest.mark.parametrize(("batch", "micro", "world"), LAYOUTS)
def test_positions_and_mirrors(batch: int, micro: int | None, world: int) -> None:
    views = reference(batch)
    position = {view: p for p, view in enumerate(views)}
    samplers = [TrainSampler(N, batch, micro, 1, 7, rank, world) for rank in range(world)]
    per_rank = [batches(sampler, 0) for sampler in samplers]
    for update in range(N // batch):
        seen = []
        for sampler, all_micro in zip(samplers, per_rank, strict=True):
            n = sampler.micro_batches
            for micro_batch in all_micro[update * n : (update + 1) * n]:
                assert len(micro_batch) <= (micro or batch)
                at = [position[view] - update * batch for view in micro_batch]
                assert [p + q for p, q in zip(at, reversed(at), strict=True)] == [batch - 1] * len(at)
                assert all(p < batch / 2 for p in at[: len(at) // 2])
                seen += at
        assert sorted(seen) == list(range(batch))


@pytest.mark.parametrize(
    ("batch", "micro"), [(7, None), (7, 7), (7, 2), (7, 3), (1, None), (1, 1), (8, 3), (8, 1), (9, 8)]
)
def test_odd_sizes_still_show_each_position_once(batch: int, micro: int | None) -> None:
    sampler = TrainSampler(N, batch, micro, 1, seed=7)
    out = batches(sampler, 0)
    views = [view for micro_batch in out[: sampler.micro_batches] for view in micro_batch]
    assert sorted(views, key=lambda v: v.seed) == sorted(reference(batch)[:batch], key=lambda v: v.seed)
    assert all(0 < len(micro_batch) <= (micro or batch) for micro_batch in out)


def test_mixing_micro_batches_is_mixing_the_global_batch() -> None:
    """x.flip(0) of each micro-batch holds the partner that the flip of the whole batch gives."""
    whole = batches(TrainSampler(N, 24, None, 1, 7), 0)[0]
    partner = dict(zip(whole, reversed(whole), strict=True))
    for rank in range(2):
        for micro_batch in batches(TrainSampler(N, 24, 10, 1, 7, rank, 2), 0)[:2]:
            assert list(reversed(micro_batch)) == [partner[view] for view in micro_batch]


def test_start_continues_exactly() -> None:
    sampler = TrainSampler(N, 8, 4, 3, seed=1)
    whole = batches(sampler, epoch=5)
    for update in range(sampler.updates_per_epoch + 1):
        assert batches(TrainSampler(N, 8, 4, 3, seed=1), 5, update) == whole[update * sampler.micro_batches :]


def test_epochs_and_seeds_differ() -> None:
    def flat(seed: int, epoch: int) -> list[View]:
        return [view for batch in batches(TrainSampler(N, 8, None, 1, seed), epoch) for view in batch]

    first = flat(0, 0)
    assert first == flat(0, 0)
    for other in (flat(0, 1), flat(1, 0)):
        assert [v.index for v in first] != [v.index for v in other]
        assert not {v.seed for v in first} & {v.seed for v in other}
    assert len({v.seed for v in first}) == len(first) == 48
    assert len({v.index for v in first}) == 48  # no image twice


def test_view_seeds_do_not_depend_on_batching_or_length() -> None:
    seeds = [TrainSampler(n, b, None, r, 7)._epoch(2)[1] for n, b, r in ((50, 8, 1), (50, 10, 3), (80, 8, 1))]
    assert np.array_equal(seeds[0], seeds[1])
    assert np.array_equal(seeds[0], seeds[2][:50])


@pytest.mark.parametrize(("batch", "repeats", "distinct"), [(8, 3, 16), (10, 3, 17), (8, 1, 48), (50, 100, 1)])
def test_repeats(batch: int, repeats: int, distinct: int) -> None:
    sampler = TrainSampler(N, batch, None, repeats, seed=7)
    shown = [view.index for view in reference(batch, repeats)]
    assert len(shown) == N  # an epoch stays as long as the data set
    assert all(len(set(shown[at : at + repeats])) == 1 for at in range(0, N, repeats))
    used = {view.index for micro_batch in batches(sampler, 0) for view in micro_batch}
    assert len(used) == sampler.distinct_images == distinct


def test_too_few_images_names_both_numbers() -> None:
    with pytest.raises(DataError, match=r"10 images, fewer than one batch \(batch_size=16\)"):
        TrainSampler(10, 16, None, 1, 0)


@pytest.mark.parametrize(("batch", "world", "advice"), [(10, 4, "8 or 16"), (2, 4, "e.g. 8"), (9, 2, "8 or 12")])
def test_batch_must_divide_into_pairs(batch: int, world: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"batch_size={batch} .* over {world} processes.*{advice}"):
        TrainSampler(N, batch, None, 1, 0, 0, world)
