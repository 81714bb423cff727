"""The one text rule of our own metrics, applied to answer and reference alike. Official metrics do not use it."""

from __future__ import annotations

import unicodedata


def normalised(text: str) -> str:
    """NFC, CRLF as LF, and one strip of white space at both ends.

    NFC makes composed and decomposed accents equal; NFKC is not used, since it would merge characters that differ
    (full-width digits, ligatures, long s). White space inside the text counts.
    """
    return unicodedata.normalize("NFC", text).replace("\r\n", "\n").strip()
