"""Answers the questions of reward functions that have a GenRM client."""

from yatt.adapters.inputs.text_parts import TextPart
from yatt.config.schema import RunConfig
from yatt.control.gpus.engines import ABORTED
from yatt.control.rollouts.scoring.judging import Judge
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, YattError
from yatt.records import message as m
from yatt.records.judged import REFUSED


async def answered_by(judge: Judge, config: RunConfig, ask: m.Ask) -> m.Message:
    """Returns Answered, or Failed with the reason."""
    genrm = next((g for g in config.genrms if g.name == ask.genrm), None)
    if genrm is None:
        return m.Failed(error=f"there is no GenRM '{ask.genrm}' in this run", exit_code=EXIT_USER_MISTAKE)
    try:
        # The function's text contains a completion, so it must not become control tokens.
        said = await judge.ask(genrm, ask, [TextPart(ask.text, False)])
    except YattError as error:
        return m.Failed(error=str(error))
    if said.finish_reason in (REFUSED, ABORTED):
        is_refused = said.finish_reason == REFUSED
        return m.Failed(
            error=said.error or "the GenRM was interrupted",
            exit_code=EXIT_USER_MISTAKE if is_refused else EXIT_FAILED,
        )
    return m.Answered(text=said.text, finish_reason=said.finish_reason)
