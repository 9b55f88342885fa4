"""Talk to a model in the terminal: ``python -m specheads.chat checkpoint=<export or base model>``.

Tokens of one verify step share a colour. The KV cache is kept: of every turn only what is new is
read. ``/plain``, or Ctrl-P while an answer comes, decodes the same turn one token at a time and
compares. Without a terminal every line of standard input is a message; answers go to standard
output, everything else to standard error.
"""

from __future__ import annotations

from pathlib import Path

from specheads.config import ChatConfig, ConfigError
from specheads.config.main import entry_point
from specheads.system.terminal import note


def run(config: ChatConfig) -> None:
    """Load, then talk until the input ends."""
    from specheads.decoding.conversation import Chat, Conversation
    from specheads.decoding.exported import choose_drafter, subject_of
    from specheads.decoding.generate import SpecDecoder
    from specheads.models.base import load_tokenizer

    try:
        path = config.template
        template = Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template={config.template} cannot be read: {error}") from None
    if not template and load_tokenizer(config.checkpoint).chat_template is None:
        raise ConfigError(
            f"{config.checkpoint} has no chat template: give one with template=<file>.jinja, or"
            " continue texts with generate"
        )
    subject = subject_of(config, config.decode)
    if template:
        subject.tokenizer.chat_template = template
    chosen = choose_drafter(subject, config.decode)
    conversation = Conversation(SpecDecoder.of(subject, config.decode, chosen.drafter), config)
    note(
        f"{config.checkpoint}: {chosen.name}, up to {chosen.num_nodes} nodes per verify step,"
        f" {str(subject.base.dtype).removeprefix('torch.')} on {subject.base.device}."
        " /help lists commands."
    )
    Chat(conversation).talk()


main = entry_point("chat", ChatConfig, run, literal=("system",))


if __name__ == "__main__":
    main()
