"""Tests that are stories: coroutines, which a function plays with what it has set up."""

from __future__ import annotations

import functools
import inspect


def played_by(play, *names):
    """Makes a decorator of stories, which name what they want of what `play` gives them.

    Their other arguments are fixtures. Those of the decorator go to `play`, after a folder and the
    story.
    """

    def stories(*args, **options):
        def decorate(story):
            wanted = inspect.signature(story).parameters

            @functools.wraps(story)
            def test(tmp_path, **fixtures):
                if "tmp_path" in wanted:
                    fixtures["tmp_path"] = tmp_path

                def told(*things):
                    given = dict(zip(names, things, strict=True))
                    return story(
                        **fixtures, **{name: given[name] for name in given if name in wanted}
                    )

                play(tmp_path, told, *args, **options)

            asked = dict.fromkeys(["tmp_path", *(name for name in wanted if name not in names)])
            kind = inspect.Parameter.KEYWORD_ONLY
            test.__signature__ = inspect.Signature(
                [inspect.Parameter(name, kind) for name in asked]
            )
            return test

        return decorate

    return stories
