"""Asynchronous RL in one file: an engine thread generates while a learner thread trains, and staleness stays bounded.

    python examples/minimal_async.py            # about 20 s on one core

The task: read two digits, say their sum as two digits ("7 8" → "15"). The policy is a small recurrent network.
What to look for: every token knows the version that sampled it, admission keeps (S + 1)·B responses between the two
threads, the ratio in the loss is against the log-prob at sampling time, and weights change in mid-response.
"""

import copy
import queue
import random
import threading
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_STALENESS, GROUPS, GROUP_SIZE, STEPS, LENGTH, DIGITS = 2, 16, 16, 400, 2, 10
BATCH = GROUPS * GROUP_SIZE


class Policy(nn.Module):
    """Next-digit logits from the two operands and the digits said so far."""

    def __init__(self) -> None:
        super().__init__()
        self.operands = nn.Embedding(DIGITS * DIGITS, 64)
        self.said = nn.Embedding(DIGITS + 1, 64)  # the last index says "nothing yet"
        self.cell = nn.GRUCell(64, 64)
        self.head = nn.Linear(64, DIGITS)

    def forward(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.said(token), state)
        return state, self.head(state)


@dataclass
class Group:
    """GROUP_SIZE responses to one prompt: [G, T] each."""

    prompt: Tensor
    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    rewards: Tensor


class Published:
    """The newest weights; the engine looks here before every token."""

    def __init__(self, policy: Policy) -> None:
        self.current = (0, copy.deepcopy(policy.state_dict()))

    def publish(self, policy: Policy) -> None:
        # Version and weights change in one assignment, so the engine never sees one without the other.
        self.current = (self.current[0] + 1, copy.deepcopy(policy.state_dict()))


def engine(
    published: Published, finished: queue.Queue[Group], slots: threading.Semaphore, stop: threading.Event
) -> None:
    """Generate groups for ever; `slots` holds the admission budget of (S + 1)·B responses."""
    policy, held = Policy(), -1
    rng = torch.Generator().manual_seed(1)
    while not stop.is_set():
        if not slots.acquire(timeout=0.1):
            continue
        a, b = random.randrange(DIGITS), random.randrange(DIGITS)
        prompt = torch.full((GROUP_SIZE,), a * DIGITS + b)
        token, state = torch.full((GROUP_SIZE,), DIGITS), policy.operands(prompt).detach()
        tokens, logprobs, versions = [], [], []
        for position in range(LENGTH):
            version, weights = published.current
            if held != version:  # in flight: the next token comes from the new weights
                held = version
                policy.load_state_dict(weights)
                if position == 0:
                    state = policy.operands(prompt).detach()
            with torch.no_grad():
                state, logits = policy(state, token)
            token = torch.multinomial(logits.softmax(-1), 1, generator=rng).squeeze(1)
            tokens.append(token)
            logprobs.append(logits.log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1))
            versions.append(torch.full((GROUP_SIZE,), held))
        said = torch.stack(tokens, 1)
        truth = torch.tensor([(a + b) // 10, (a + b) % 10])
        rewards = (said == truth).float().mean(1)
        finished.put(Group(prompt, said, torch.stack(logprobs, 1), torch.stack(versions, 1), rewards))


def current_logprobs(policy: Policy, prompt: Tensor, tokens: Tensor) -> Tensor:
    """log πθ of each token, [B, T], with gradient."""
    state, token, out = policy.operands(prompt), torch.full_like(prompt, DIGITS), []
    for position in range(tokens.shape[1]):
        state, logits = policy(state, token)
        token = tokens[:, position]
        out.append(-F.cross_entropy(logits, token, reduction="none"))
    return torch.stack(out, 1)


def grpo_loss(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−mean min(rA, clip(r, 0.8, 1.28)·A), r = πθ / the policy that sampled."""
    ratio = (logprobs - behavior_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()


def main() -> float:
    """Train; return the mean reward of the last 20 steps."""
    torch.manual_seed(0)
    random.seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    published, finished, stop = Published(policy), queue.Queue(), threading.Event()
    slots = threading.Semaphore((MAX_STALENESS + 1) * GROUPS)
    generating = threading.Thread(target=engine, args=(published, finished, slots, stop), daemon=True)
    generating.start()
    ages: Counter[int] = Counter()
    rewards: list[float] = []
    for step in range(STEPS):
        groups = [finished.get() for _ in range(GROUPS)]  # first in, first out: the oldest never overtake the bound
        stale = published.current[0] - torch.cat([g.versions for g in groups])
        assert int(stale.max()) <= MAX_STALENESS
        ages.update(stale.flatten().tolist())
        advantages = torch.cat([(g.rewards - g.rewards.mean()) / (g.rewards.std() + 1e-6) for g in groups])
        logprobs = current_logprobs(
            policy, torch.cat([g.prompt for g in groups]), torch.cat([g.tokens for g in groups])
        )
        loss = grpo_loss(logprobs, torch.cat([g.logprobs for g in groups]), advantages.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        published.publish(policy)
        slots.release(GROUPS)  # a batch has left: one batch more may start, on the new version or a later one
        rewards.append(float(torch.cat([g.rewards for g in groups]).mean()))
        if step % 50 == 49:
            print(f"step {step + 1}: reward {sum(rewards[-20:]) / 20:.3f}, staleness {dict(sorted(ages.items()))}")
    stop.set()
    generating.join()
    return sum(rewards[-20:]) / 20


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert main() > 0.8
