"""How text becomes words, as one rule for Python and for TensorFlow graphs.

A word is a run of letters, with apostrophes inside ("don't"); a number is a run of
digits, with points inside ("3.11"); any other visible character is a word of its
own. `Tokenizer.words` applies the rule with `re`, which is several times faster on
the host; `Tokenizer.split` with tensorflow-text, inside a graph.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

# Python's `re` has no \p{L}; `[^\W\d_]` is the same set as [\p{L}\p{Nl}\p{No}].
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+(?:\.\d+)*|[^\w\s]|_")
_RE2_LETTER = r"[\p{L}\p{Nl}\p{No}]"
_RE2_SPACES = r"\s\v\x{1c}-\x{1f}\x{85}\p{Z}"
_RE2_WORD = rf"{_RE2_LETTER}+(?:'{_RE2_LETTER}+)*|\p{{Nd}}+(?:\.\p{{Nd}}+)*"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Splits text into words.

    Attributes:
      lower_case: Whether words are lower-cased.
      is_tokenized: Whether texts are words already, separated by white space, as
        in TFF's Stack Overflow; then nothing else is split.
    """

    lower_case: bool = True
    is_tokenized: bool = False

    def words(self, text: str) -> list[str]:
        """Returns the words of one text, in order."""
        if self.lower_case:
            text = text.lower()
        return text.split() if self.is_tokenized else _WORD.findall(text)

    def split(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Returns the words of each text, as a graph of tensorflow-text ops.

        Args:
          texts: Strings, UTF-8, shape [n].

        Returns:
          Strings, ragged shape [n, None]: what `words` returns for each.
        """
        import tensorflow as tf
        import tensorflow_text as tf_text

        if self.lower_case:
            texts = tf.strings.lower(texts, encoding="utf-8")
        # Every stretch of text is a delimiter, and all but white space are kept.
        token = rf"[^{_RE2_SPACES}]+" if self.is_tokenized else rf"{_RE2_WORD}|(?s:.)"
        return tf_text.regex_split(
            texts,
            delim_regex_pattern=rf"[{_RE2_SPACES}]+|{token}",
            keep_delim_regex_pattern=rf"[^{_RE2_SPACES}](?s:.*)",
        )
