"""One group of a simulation, and its turns."""

from headway.planner.engine import SimulatedEngine


class Group:
    """One group under way."""

    __slots__ = ("engine", "left", "lengths", "tokens", "version")

    def __init__(self, version: int, lengths: list[int]) -> None:
        self.version, self.lengths = version, lengths
        """Issued at this version: no older one may sample for it."""
        self.engine: SimulatedEngine | None = None
        """Where the last member went."""
        self.left = len(lengths)
        """Members that are not done."""
        self.tokens: list[list[tuple[int, int]]] = [[] for _ in lengths]
        """(version, tokens) of each member, oldest first."""

    @property
    def oldest_version(self) -> int:
        return min(counts[0][0] for counts in self.tokens)


def turn_tokens(length: int, said: int, num_turns: int) -> int:
    """Tokens of the next turn of a response: an even share, and what is left in the last."""
    return min(length - said, -(-length // num_turns))
