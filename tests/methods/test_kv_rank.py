"""What `kv_rank` promises beyond every method's contract: maps, ranks, cropped caches, positions."""

from __future__ import annotations

import pytest
import torch

from chai_eval.attention.low_rank import LowRank
from chai_eval.attention.rope import rotations
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.methods.kv_rank import eigenmaps, ranks_within
from tests.attention.tiny import MODELS, requests
from tests.methods.cases import CASES
from tests.methods.cases.kv_rank import CONTEXT, moments_of


def moment(*shape: int, vectors: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(*shape, vectors, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn @ drawn.transpose(-1, -2)


def test_what_is_left_out_is_the_least_that_any_subspace_of_that_rank_can_leave_out() -> None:
    asking, asked = moment(1, 1, 12, vectors=30, seed=0), moment(1, 1, 12, vectors=30, seed=1)
    found = eigenmaps(asking, asked)

    def loss(kept: torch.Tensor) -> float:
        """Half the mean of (qᵀ(E − 1)u)², of moments that are independent."""
        error = kept - torch.eye(12, dtype=torch.float64)
        return 0.5 * float(torch.einsum("ij,jk,lk,il->", error, asked[0, 0], error, asking[0, 0]))

    for rank in (3, 7):
        kept = found.up[0, 0, :rank].T @ found.down[0, 0, :rank]
        assert loss(kept) == pytest.approx(float(found.cost[0, 0, rank:].sum()), rel=1e-4)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(50):
            axes = torch.linalg.qr(torch.randn(12, rank, generator=generator, dtype=torch.float64)).Q
            assert loss(axes @ axes.T) > loss(kept)
            turned = kept + 1e-3 * torch.randn(12, rank, generator=generator).double() @ found.down[0, 0, :rank]
            assert loss(turned) > loss(kept)


def test_singular_moments_make_no_map_blow_up() -> None:
    asking, asked = moment(2, 3, 16, vectors=4, seed=0), moment(2, 3, 16, vectors=5, seed=1)
    asking[0, 0] = 0
    found = eigenmaps(asking, asked)
    maps = LowRank.of(found.down[0], found.up[0], [16, 8, 4], torch.zeros(1))
    states = torch.randn(2, 3, 7, 16)
    restored = maps.restore(maps.project(states))
    assert torch.isfinite(restored).all()
    torch.testing.assert_close(restored[:, 0], states[:, 0], atol=1e-4, rtol=0)  # all dimensions are kept
    # Nothing that is cached is larger than what it stands for.
    cached = maps.project(states)
    assert float(cached.square().sum()) == pytest.approx(float(restored.square().sum()), rel=1e-4)
    # What asks lies in four dimensions: of these, what is asked there is kept to the last bit that counts.
    asks = torch.linalg.eigh(asking[0, 2]).eigenvectors[:, -4:].float()
    lost = (restored[:, 2] - states[:, 2]) @ asks
    assert float(lost.abs().max()) < 1e-2


def test_ranks_are_given_where_leaving_out_costs_most() -> None:
    costs = torch.zeros(1, 2, 8, dtype=torch.float64)
    costs[0, 0] = torch.tensor([9.0, 8, 7, 6, 0.4, 0.3, 0.2, 0.1])
    costs[0, 1] = torch.tensor([2.0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5])
    assert [ranks_within([costs], kept)[0].tolist() for kept in (0, 4, 8, 12, 15, 16)] == [
        [[0, 0]], [[4, 0]], [[4, 4]], [[4, 8]], [[4, 8]], [[8, 8]],
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_cropped_cache_goes_on_with_other_tokens_as_if_they_had_always_been_there(name: str) -> None:
    model, (first, other) = MODELS[name](), requests([20, 9])
    with CASES["kv_rank"].build(model).applied(model), torch.no_grad():
        whole = model(input_ids=torch.cat((first[:12], other))[None], use_cache=False).logits[0]
        cache = model(input_ids=first[None], use_cache=True).cache
        cache.crop(-8)
        found = model(input_ids=other[None], cache=cache, use_cache=True).logits[0]
    torch.testing.assert_close(found, whole[12:], atol=1e-4, rtol=0)


def test_the_longer_the_context_the_more_is_left_out_by_as_many_dimensions() -> None:
    """A single direction that is turned by more positions fills more dimensions."""
    model, direction = MODELS["llama"](), torch.ones(1, 1, 8, 1, dtype=torch.float64)
    asked, left_out = direction @ direction.transpose(-1, -2), []
    for context in (1, 8, 40, 128):
        turns = rotations(model, context, 8)
        assert turns is not None
        left_out.append(float(eigenmaps(turns.average(asked), turns.average(asked)).cost[..., 4:].sum()))
    assert left_out == sorted(left_out)
    assert left_out[-1] > 10 * max(left_out[0], 1e-9)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"saving": 1}, "method.saving: 1 given; allowed: numbers from 0 to below 1"),
        ({"saving": 0.5, "reduce": "keys"}, "method.saving: 0.5 given with reduce=keys; allowed: below 0.5"),
        ({"reduce": "all"}, "method.reduce: 'all' given; allowed: both, keys, values"),
        ({"context": 0}, "method.context: 0 given; allowed: a whole number from 1 up, or null"),
        ({"context": 129}, "method.context: 129 given; allowed: 1 to 128, the longest this model reads"),
        ({"moments": None}, "method.moments: None given; allowed: a calibration"),
        ({"moments": "nowhere"}, "method.moments: no moments in a calibration 'nowhere'; allowed: a calibration of"),
    ],
)
def test_bad_settings_are_one_line(settings: dict, line: str) -> None:  # type: ignore[type-arg]
    model = MODELS["llama"]()
    with pytest.raises(SettingError) as raised:
        build_method("kv_rank", **{"moments": moments_of(model), **settings}).check_settings(model)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
    assert CONTEXT <= 128
