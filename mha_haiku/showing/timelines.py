"""The page of heads over training: lines per head, and a slider through the steps."""

from collections.abc import Mapping

import numpy as np

from mha_haiku.showing import page

_MOST_STEPS = 400  # that are drawn; of more, some at equal distances


def render(table: str, alarms: str, meanings: Mapping[str, str], title: str) -> str:
    """Renders the page, a whole HTML document, from the text of its CSV files."""
    header, *rows = table.splitlines()
    steps = [*dict.fromkeys(x.partition(",")[0] for x in rows)]
    places = np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).round()
    drawn = {steps[int(i)] for i in places}
    rows = [x for x in rows if x.partition(",")[0] in drawn]
    content = {"table": [header, *rows], "alarms": alarms.splitlines()[1:]}
    return page.document("timeline", title, content | {"meanings": dict(meanings)})
