"""Every combination of signs: a second start never begins beside one that is seen to live."""

from itertools import product

from yatt.core.attempts.occupancy import Life, Signs, life_of

NAMES = ("is_finished", "is_started", "is_ended", "launcher_is_here", "launcher_lives")
ALL = [
    Signs(**dict(zip(NAMES, values, strict=True)), job_lives=job, is_of_job=of_job)
    for values in product((False, True), repeat=len(NAMES))
    for job in (None, False, True)
    for of_job in (False, True)
]


def test_what_is_seen_to_live_is_alive_whatever_else_is_noted() -> None:
    for signs in ALL:
        lives = signs.job_lives or (signs.launcher_is_here and signs.launcher_lives)
        assert (life_of(signs) is Life.ALIVE) == bool(lives)


def test_a_run_is_over_only_if_something_says_so() -> None:
    for signs in ALL:
        if life_of(signs) is Life.OVER:
            assert (
                signs.is_finished
                or not signs.is_started
                or signs.is_ended
                or (signs.launcher_is_here and not signs.launcher_lives)
                or (signs.is_of_job and signs.job_lives is False)
            )


def test_a_start_elsewhere_without_an_end_must_be_watched() -> None:
    signs = Signs(
        is_finished=False, is_started=True, is_ended=False, launcher_is_here=False, launcher_lives=False,
        job_lives=None,
    )  # fmt: skip
    assert life_of(signs) is Life.UNSEEN
