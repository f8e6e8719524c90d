"""Checks that who is to see pictures can, before anything starts: a GenRM, and a policy its environment's."""

from dataclasses import replace

from yatt.adapters.inputs.encoded_prompt import encode_question
from yatt.adapters.inputs.text_parts import PICTURE, TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.schema import GenRMSection, RunConfig
from yatt.core.samples.verdict import Shown, render_with_pictures
from yatt.errors import ConfigError
from yatt.models.folder import takes_pictures
from yatt.models.pictures.tokens import picture_tokens, unlimited_tokens
from yatt.records.episode import IMAGE_MARK, MediaRef


def refuse_blind(config: RunConfig, genrm: GenRMSection, key: str) -> None:
    """Refuses a GenRM that is to see and cannot.

    Raises:
        ConfigError: its model or engine takes no pictures, or there are none. Whether a service takes some is
            known by its answer only (`yatt check --ask`).
    """
    if genrm.has_engine and not takes_pictures(genrm.model):
        raise ConfigError(f"{key}.sees: {genrm.model} takes no pictures; name another model, or remove it.")
    if genrm.has_engine and genrm.engine == "transformers":
        raise ConfigError(f"{key}.sees: engine transformers takes no pictures; write vllm.")
    if not takes_pictures(config.model.path):
        raise ConfigError(
            f"{key}.sees: the policy {config.model.path} takes text only, so prompts have no pictures; "
            "remove it."
        )


def seeing_notes(
    config: RunConfig, genrm: GenRMSection, key: str, tokenizer: Tokenizer, shortest: Shown
) -> list[str]:
    """Encodes a question with the largest picture; returns notes.

    Args:
        shortest: the shortest values that a template may show.

    Raises:
        ConfigError: the chat template leaves it out.
    """
    tokens = picture_tokens(genrm.model, config.media.min_pixels, config.media.max_pixels)
    shown = replace(shortest, prompt=IMAGE_MARK)
    refs = [MediaRef("", "", *tokens.largest_size)]
    rendered = render_with_pictures(genrm.template or "{completion}", shown, refs)
    parts = [PICTURE if isinstance(part, MediaRef) else TextPart(*part) for part in rendered]
    try:
        ids, _ = encode_question(parts, refs, tokens, tokenizer, is_chat=genrm.chat)
    except ValueError as error:
        raise ConfigError(
            f"{key}.sees: the chat template of {genrm.model} does not show a picture ({error}); use the "
            "template of the model's own folder."
        ) from error
    if genrm.max_model_tokens and len(ids) >= genrm.max_model_tokens:
        return [
            f"{key}.max_model_tokens: a question with the largest picture has {len(ids)} tokens, and the "
            f"GenRM takes {genrm.max_model_tokens} with its answer. Write a smaller media.max_pixels."
        ]
    return []


def check_answer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Encodes an answer of the environment, and one with a picture if there may be some.

    Raises:
        ConfigError: the chat template does not show it.
    """
    role, folder = config.environment.role, config.model.path
    tokenizer.encode_answer(role, "an answer")
    if not config.environment.images:
        return
    ids = tokenizer.encode_answer(role, [TextPart("an answer", False), PICTURE])
    if ids.count(unlimited_tokens(folder).image_token_id) != 1:
        raise ConfigError(
            f"environment.role: the chat template of {folder} shows no picture in a message of the role "
            f"{role}; write another role."
        )
