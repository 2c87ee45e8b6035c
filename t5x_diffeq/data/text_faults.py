"""What keeps a text from being trained on."""


def find_text_fault(text: str) -> str | None:
    """Why a document can't be trained on (it is then skipped and counted), or None if it can."""
    if not text or text.isspace():
        return "empty"
    if "\0" in text:
        return "with a NUL character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate stands for an undecodable byte
        return "not UTF-8"
    return None
