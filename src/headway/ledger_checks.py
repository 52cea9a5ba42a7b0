"""The proof of a ledger: events counted where they happened against fates summed where they ended."""

import sqlite3
from collections.abc import Iterator

from headway.ledger_file import histogram

_IMPOSSIBLE = {
    "a group id was skipped: its prompt was never trained": """
        SELECT group_id + 1 FROM groups AS g WHERE group_id < (SELECT MAX(group_id) FROM groups)
        AND NOT EXISTS (SELECT 1 FROM groups WHERE group_id = g.group_id + 1)""",
    "the first group is not group 0": "SELECT MIN(group_id) FROM groups HAVING MIN(group_id) != 0",
    "a group does not have all of its members": """
        SELECT group_id FROM groups LEFT JOIN samples USING (group_id) GROUP BY group_id
        HAVING COUNT(member) != (SELECT value FROM meta WHERE name = 'group_size')""",
    "a sample belongs to no issued group": """
        SELECT group_id, member FROM samples WHERE group_id NOT IN (SELECT group_id FROM groups)""",
    "a sample's fate contradicts its record": """
        SELECT group_id, member FROM samples WHERE NOT COALESCE(CASE fate
            WHEN 'generating' THEN num_tokens IS NULL AND step IS NULL AND reason IS NULL
            WHEN 'ready' THEN num_tokens > 0 AND num_masked IS NULL AND step IS NULL AND reason IS NULL
            WHEN 'dropped' THEN reason IS NOT NULL AND step IS NULL AND num_masked IS NULL
            WHEN 'trained' THEN num_masked >= 0 AND num_masked < num_tokens AND step IS NOT NULL AND reason IS NULL
            WHEN 'masked' THEN num_masked = num_tokens AND step IS NOT NULL AND reason IS NULL
        END, 0)""",
    "a ready response is not stored": """
        SELECT group_id, member FROM samples LEFT JOIN payloads USING (group_id, member)
        WHERE fate = 'ready' AND response IS NULL""",
    "a response is stored for a sample that has none": """
        SELECT group_id, member FROM payloads LEFT JOIN samples USING (group_id, member)
        WHERE fate IS NULL OR fate IN ('generating', 'dropped')""",
    "a response is gone that no checkpoint covers yet": """
        SELECT group_id, member FROM samples LEFT JOIN payloads USING (group_id, member)
        WHERE step > (SELECT value FROM meta WHERE name = 'pruned_step') AND response IS NULL""",
    "a sample was not trained with its group": """
        SELECT group_id, member FROM samples JOIN groups USING (group_id) WHERE samples.step IS NOT groups.step""",
    "a step was skipped or never committed": """
        SELECT step FROM (SELECT step FROM groups UNION SELECT step + 1 FROM steps
        WHERE step < (SELECT MAX(step) FROM steps) UNION SELECT 0 FROM steps)
        WHERE step IS NOT NULL AND step NOT IN (SELECT step FROM steps)""",
    "a step does not hold what it consumed (trained twice, or lost)": """
        SELECT steps.step FROM steps LEFT JOIN samples ON samples.step = steps.step GROUP BY steps.step
        HAVING COUNT(member) != num_samples OR TOTAL(samples.num_tokens) != steps.num_tokens
        OR TOTAL(samples.num_masked) != steps.num_masked""",
    "a step trained an older version than the step before": """
        SELECT step FROM (SELECT step, policy_version, LAG(policy_version) OVER (ORDER BY step) AS before FROM steps)
        WHERE policy_version < before""",
    "a sample holds tokens newer than the version it trained": """
        SELECT group_id, member FROM samples JOIN steps USING (step) WHERE newest_version > policy_version""",
    "a sample's oldest token is newer than its newest": """
        SELECT group_id, member FROM samples WHERE oldest_version > newest_version""",
}
"""What must never be, and the query that finds it."""


def violations(
    db: sqlite3.Connection, conserved: dict[str, tuple[int, dict[str, int]]], *, max_staleness: int | None
) -> Iterator[str]:
    """Every fault of a ledger in words; nothing when the accounts add up.

    `conserved`: unit to (number counted when it happened, fate to number).
    """
    for fault, query in _IMPOSSIBLE.items():
        rows = db.execute(query).fetchall()
        if rows:
            yield f"{fault}: {len(rows)} found, first {', '.join(map(str, rows[0]))}"
    for unit, (counted, fates) in conserved.items():
        if sum(fates.values()) != counted:
            parts = " + ".join(f"{num} {fate}" for fate, num in fates.items())
            yield f"{unit} are not conserved: {counted} issued, but {parts} = {sum(fates.values())}"
    for step, num_tokens, text in db.execute("SELECT step, num_tokens - num_masked, token_staleness FROM steps"):
        if sum(histogram(text).values()) != num_tokens:
            yield f"step {step} trained {num_tokens} tokens, but its staleness histogram holds another number"
    if max_staleness is not None:
        yield from _over_bound(db, max_staleness)


def _over_bound(db: sqlite3.Connection, max_staleness: int) -> Iterator[str]:
    for step, text in db.execute("SELECT step, token_staleness FROM steps"):
        oldest = max(histogram(text), default=0)
        if oldest > max_staleness:
            yield f"step {step} trained tokens of staleness {oldest}; the bound is {max_staleness}"
    # A partly masked sample may be older: the tokens over the bound are the masked ones, as the histogram shows.
    rows = db.execute(
        "SELECT group_id, member, policy_version - oldest_version FROM samples JOIN steps USING (step)"
        " WHERE samples.num_masked = 0 AND policy_version - oldest_version > ?",
        (max_staleness,),
    )
    for group_id, member, staleness in rows:
        yield f"sample {(group_id, member)} was trained at staleness {staleness}; the bound is {max_staleness}"
