"""Every family is tested on at least twelve layouts, and resumed on another one; in all there are hundreds of tests."""

from collections import defaultdict

import test_elastic_resume
import test_experts_on_layouts
import test_families_on_layouts
import test_mamba_on_layouts
import test_matrix

from kenotron.config.architecture import built_in_sections
from support.layout_runs import FAMILIES, HYBRIDS, SPARSE, STATE_SPACES


def test_every_family_has_twelve_layouts_and_resumes_on_another() -> None:
    tested = defaultdict(set, llama={layout for _, _, layout in test_matrix.LAYOUTS})
    for family, _, layout in (*test_families_on_layouts.CASES, *test_mamba_on_layouts.SLOW):
        tested[family].add(layout)
    for family in SPARSE:
        tested[family] = {layout for _, layout in test_experts_on_layouts.LAYOUTS}
    assert {*FAMILIES, *SPARSE, *STATE_SPACES, *HYBRIDS} <= tested.keys()
    assert set(built_in_sections()) - {"llamoe"} <= tested.keys()  # nanotron's alone
    assert {family: len(layouts) for family, layouts in tested.items() if len(layouts) < 12} == {}
    assert sum(map(len, tested.values())) > 400
    resumed = {problem for problem, _, _ in (*test_elastic_resume.PAIRS, *test_elastic_resume.MORE_PAIRS)}
    assert tested.keys() - {"llama"} <= resumed  # whose problems are called tied, muon, …
