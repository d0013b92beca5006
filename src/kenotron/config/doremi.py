"""`doremi`: domains of the data, their shares, and the reference model of a proxy run, which learns new shares."""

from kenotron.config.section import Section, key


class DoReMi(Section):
    """Domain reweighting with minimax optimization (DoReMi, arXiv 2305.10429)."""

    domain_names: list[str] = key("Names of the domains, one for each dataset of the mixture; or text with commas.")
    domain_weights: list[float] | None = key(
        "Shares of the domains in the data, which replace the mixture's weights, or the `doremi.json` of a proxy run. "
        "null: the mixture's weights, or in proportion to tokens if the dataset is a folder of domains.",
        None,
    )
    ref_model_resume_checkpoint_path: str | None = key(
        "Checkpoint of the reference model; with it this is the proxy run, which learns domain weights.", None
    )
    step_size: float = key("eta: the step size of the domain weights toward a higher excess loss.", 1.0, gt=0)
    smoothing_param: float = key("c: the uniform part of the weights at every step.", 1e-3, ge=0, lt=1)
