"""`doremi`: domains of the data, their shares, and the reference that a proxy run learns new shares beside."""

from kenotron.config.section import Section, key


class DoReMi(Section):
    """Domain reweighting with minimax optimization (DoReMi, arXiv 2305.10429)."""

    domain_names: list[str] = key("Names of the domains, one for each dataset of the mixture; or text with commas.")
    domain_weights: list[float] | None = key(
        "Shares of the domains in the data, which replace those of the mixture, or the `doremi.json` of a proxy run. "
        "null: as the mixture has them; in proportion to their tokens, if the dataset is a folder of domains.",
        None,
    )
    ref_model_resume_checkpoint_path: str | None = key(
        "Checkpoint of the reference; with it this is the proxy run, which learns domain weights.", None
    )
    step_size: float = key("eta: how fast weights follow where the proxy is worse than the reference.", 1.0, gt=0)
    smoothing_param: float = key("c: the part of the weights that is uniform at every step.", 1e-3, ge=0, lt=1)
