"""The one table of algorithms: a name, its loss, what it needs, what it defaults to."""

from headway.algorithms.clipped import estr_loss, kpop_loss, opsm_loss, ppo_loss, sat_loss, sat_statistics
from headway.algorithms.contract import Algorithm, Need
from headway.algorithms.corrections import (
    decoupled_masked_loss,
    decoupled_ppo_loss,
    icepop_loss,
    mis_loss,
    tis_loss,
)
from headway.algorithms.current_policy import asympo_loss, naive_loss, spo_loss
from headway.algorithms.sequence import gspo_loss, sat_gspo_loss, sat_gspo_statistics
from headway.algorithms.weighted import (
    cispo_loss,
    dppo_tv_loss,
    m2po_loss,
    m2po_statistics,
    reinforce_loss,
    sapo_loss,
    topr_loss,
)
from headway.errors import nearest

NOTHING: frozenset[Need] = frozenset()
BEHAVIOR: frozenset[Need] = frozenset({"behavior_logprobs"})
ENTROPY: frozenset[Need] = frozenset({"behavior_logprobs", "behavior_entropy"})
PROXIMAL: frozenset[Need] = frozenset({"behavior_logprobs", "proximal_logprobs"})
PER_RESPONSE: frozenset[Need] = frozenset({"behavior_logprobs", "response_advantages"})
GROUPS: frozenset[Need] = frozenset({"whole_groups"})

_ROWS = (
    Algorithm(
        name="reinforce",
        loss=reinforce_loss,
        advantage="rloo",
        needs=NOTHING,
        paper="Williams 1992",
        summary="plain log-likelihood times advantage; correct only on-policy",
    ),
    Algorithm(
        name="ppo",
        loss=ppo_loss,
        defaults={"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None},
        needs=BEHAVIOR,
        paper="1707.06347",
        summary="clip of the ratio to the policy that sampled",
    ),
    Algorithm(
        name="grpo",
        loss=ppo_loss,
        reduction="seq_mean_token_mean",
        defaults={"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None},
        needs=BEHAVIOR,
        paper="2402.03300",
        summary="PPO's clip with group-normalized advantages, averaged per response",
    ),
    Algorithm(
        name="dapo",
        loss=ppo_loss,
        defaults={"eps_low": 0.2, "eps_high": 0.28, "dual_clip": None},
        needs=BEHAVIOR,
        paper="2503.14476",
        summary="PPO's clip, higher on the upper side",
    ),
    Algorithm(
        name="estr",
        loss=estr_loss,
        defaults={"tau": 1.6, "entropy_floor": 0.01, "eps_low": 0.2, "eps_high": 0.28},
        needs=ENTROPY,
        paper="2607.22186",
        summary="drops tokens whose squared log-ratio is large for their entropy, then clips",
    ),
    Algorithm(
        name="sat",
        loss=sat_loss,
        defaults={"quantile": 0.9, "exponent": 2, "eps_low": 0.2, "eps_high": 0.2, "scope": "micro_batch"},
        needs=BEHAVIOR,
        statistics=sat_statistics,
        paper="2607.18722",
        summary="narrows the clip for the stalest tokens of the batch",
    ),
    Algorithm(
        name="sat_gspo",
        loss=sat_gspo_loss,
        reduction="seq_mean_token_mean",
        defaults={"quantile": 0.9, "exponent": 2, "eps_low": 0.2, "eps_high": 0.2, "scope": "micro_batch"},
        needs=BEHAVIOR,
        statistics=sat_gspo_statistics,
        paper="2607.18722",
        summary="SAT on the response ratio of GSPO",
    ),
    Algorithm(
        name="gspo",
        loss=gspo_loss,
        reduction="seq_mean_token_mean",
        defaults={"eps_low": 3e-4, "eps_high": 4e-4},
        needs=BEHAVIOR,
        paper="2507.18071",
        summary="clip of the length-normalized response ratio",
    ),
    Algorithm(
        name="naive",
        loss=naive_loss,
        advantage="centered",
        reduction="group_mean",
        defaults={"p_low": None, "p_high": None},
        needs=GROUPS,
        paper="2606.03070",
        summary="mean log-likelihood of a response times advantage, no behavior data",
    ),
    Algorithm(
        name="spo",
        loss=spo_loss,
        advantage="centered",
        reduction="group_mean",
        defaults={"alpha": 0.2, "p_low": None, "p_high": None},
        needs=GROUPS,
        paper="2606.03070",
        summary="naive with the negative side scaled down, no behavior data",
    ),
    Algorithm(
        name="asympo",
        loss=asympo_loss,
        advantage="centered",
        reduction="group_mean",
        defaults={"p_low": None, "p_high": None, "floor": 1e-6},
        needs=GROUPS,
        paper="2606.03070",
        summary="each response scaled by its own likelihood so both signs balance, no behavior data",
    ),
    Algorithm(
        name="cispo",
        loss=cispo_loss,
        defaults={"eps_low": None, "eps_high": 4.0},
        needs=BEHAVIOR,
        paper="2506.13585",
        summary="clips the importance weight, never drops a token",
    ),
    Algorithm(
        name="decoupled_ppo",
        loss=decoupled_ppo_loss,
        defaults={"eps": 0.2, "cap": 5.0},
        needs=PROXIMAL,
        paper="2505.24298",
        summary="clip around a proximal policy, weighted by proximal over behavior",
    ),
    Algorithm(
        name="ppo_ewma",
        loss=decoupled_ppo_loss,
        defaults={"eps": 0.2, "cap": 100.0},
        needs=PROXIMAL,
        paper="2110.00641",
        summary="decoupled clip around a slowly moving average of the parameters",
    ),
    Algorithm(
        name="decoupled_masked",
        loss=decoupled_masked_loss,
        defaults={"eps": 0.004, "eps_high": None, "band": 1.01, "discrepancy_weight": True},
        needs=PROXIMAL,
        paper="2605.12070",
        summary="tight band on the engine discrepancy, tight one-sided clip on the staleness",
    ),
    Algorithm(
        name="tis",
        loss=tis_loss,
        defaults={"level": "token", "cap": 2.0, "eps": 0.2},
        needs=PROXIMAL,
        paper="Yao et al. 2025, truncated importance sampling",
        summary="clip around the proximal policy, weighted by a truncated ratio",
    ),
    Algorithm(
        name="mis",
        loss=mis_loss,
        defaults={"level": "token", "low": None, "high": None, "eps": 0.2},
        needs=PROXIMAL,
        paper="Liu et al. 2025, masked importance sampling",
        summary="clip around the proximal policy, dropping what lies outside a band",
    ),
    Algorithm(
        name="icepop",
        loss=icepop_loss,
        defaults={"low": 0.5, "high": 5.0, "eps": 0.2},
        needs=PROXIMAL,
        paper="2510.18855",
        summary="clip around the proximal policy, ratio kept as weight inside a band",
    ),
    Algorithm(
        name="kpop",
        loss=kpop_loss,
        defaults={"phi": 2.0, "eps_low": 0.2, "eps_high": 0.2},
        needs=BEHAVIOR,
        paper="binary-KL token mask",
        summary="PPO's clip on tokens whose two binary KLs are small",
    ),
    Algorithm(
        name="m2po",
        loss=m2po_loss,
        defaults={"budget": 0.04, "scope": "batch"},
        needs=BEHAVIOR,
        statistics=m2po_statistics,
        paper="2510.01161",
        summary="drops the fewest outward-moving tokens that bring the second moment under a budget",
    ),
    Algorithm(
        name="sapo",
        loss=sapo_loss,
        defaults={"tau_pos": 1.0, "tau_neg": 1.05},
        needs=BEHAVIOR,
        paper="2511.20347",
        summary="a soft gate in place of the clip",
    ),
    Algorithm(
        name="topr",
        loss=topr_loss,
        needs=PER_RESPONSE,
        paper="2503.14286",
        summary="likelihood on good responses, truncated importance sampling on bad ones",
    ),
    Algorithm(
        name="opsm",
        loss=opsm_loss,
        defaults={"delta": 0.1, "eps_low": 0.2, "eps_high": 0.2},
        needs=PER_RESPONSE,
        paper="2512.02556",
        summary="drops bad responses the policy has already left, clips the rest",
    ),
    Algorithm(
        name="dppo_tv",
        loss=dppo_tv_loss,
        defaults={"delta": 0.2},
        needs=BEHAVIOR,
        paper="2602.04879",
        summary="bounds the change of the token's probability instead of its ratio",
    ),
)

ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name. Raises ValueError naming the nearest one."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; {nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]
