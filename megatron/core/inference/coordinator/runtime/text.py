"""Text to tokens and back, exactly as megatron-core's engine does it."""

from typing import Any

from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)


def tokenize(tokenizer: Any, prompt: str, add_bos: bool) -> list[int]:
    """Tokenize a prompt, its BOS token included or stripped as the engine would.

    Args:
        tokenizer: A Megatron tokenizer.
        prompt: The text.
        add_bos: Whether the sampling parameters ask for a BOS token.
    """
    tokens: list[int] = TextGenerationController.tokenize_prompt(tokenizer, prompt, add_bos)
    return tokens


def generated_text(tokenizer: Any, reply: dict[str, Any]) -> str:
    """The text of a reply's generated tokens.

    Args:
        tokenizer: A Megatron tokenizer.
        reply: An unpacked reply with `generated_tokens` and `sampling_params`.
    """
    sampling = reply.get("sampling_params") or {}
    keep_stop = bool(sampling.get("detokenize_stop_sequence", False))
    text: str = TextGenerationController.detokenize(
        tokenizer, reply.get("generated_tokens") or [], remove_EOD=not keep_stop
    )
    return text
