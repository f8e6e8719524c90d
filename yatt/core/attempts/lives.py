"""When the controller of an engine node is started again within an attempt: the rule of its launcher. Pure.

The process that started a controller knows that it has ended, and starts the next one, its next *life*. A
node that fails again and again costs only itself: its pauses grow.
"""

from dataclasses import dataclass

from yatt.errors import EXIT_EXCLUDED, EXIT_FAILED, EXIT_USER_MISTAKE

FIRST_S, MOST_S = 1.0, 300.0
"""Shortest and longest pause before a start."""

FAILED_S = 60.0
"""Shortest pause after exit code 1, which may mean that the attempt ends: its leader has ended by then."""

SHORT_S = 600.0
"""A life that lasted less doubles the pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """The lives of one node's controller; times in monotonic seconds.

    Attributes:
        life: the number of the newest.
        began_s: when it began.
        num_short: how many in a row were short.
        due_s: when the next one begins; None: the newest has not ended, or is the last.
    """

    life: int = 1
    began_s: float
    num_short: int = 0
    due_s: float | None = None

    def ended(self, code: int, now_s: float) -> "Lives":
        """Returns the state after the newest ended with this exit code, negative for a signal."""
        is_last = code >= 0 and code not in (EXIT_FAILED, EXIT_EXCLUDED)
        num_short = self.num_short + 1 if now_s - self.began_s < SHORT_S else 0
        pause_s = min(MOST_S, FIRST_S * 2.0 ** max(0, num_short - 1))
        least_s = FAILED_S if code == EXIT_FAILED else FIRST_S
        due_s = None if is_last else now_s + max(pause_s, least_s)
        return Lives(life=self.life, began_s=self.began_s, num_short=num_short, due_s=due_s)

    def started(self, life: int, now_s: float) -> "Lives":
        """Returns the state after a later one began."""
        return Lives(life=life, began_s=now_s, num_short=self.num_short)


def is_own_mistake(life: int, exit_code: int) -> bool:
    """Whether what looks like the user's mistake is a node's own fault: it came later, and its machine may
    lack what the others have."""
    return life > 1 and exit_code == EXIT_USER_MISTAKE
