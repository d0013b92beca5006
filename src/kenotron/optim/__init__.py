"""Optimizers, schedules and gradient clipping: everything between gradients and new weights.

    schedule.learning_rate          the rate of a step, by arithmetic
    groups.parameter_groups         rate and weight decay of each parameter
    build.build_optimizer           AdamW, SGD, Lion, Muon, NorMuon, SOAP, or any other
    own.OwnOptimizer                the base of lion, muon, soap and stochastic_rounding (AdamW for bf16 weights)
    matrices, matrix_owners         updates of whole matrices, on any layout
    combined.CombinedOptimizer      several optimizers as one
    custom.build_custom             torch's optimizers by name, or any by dotted path
    clip.clip_gradients             the global gradient norm
    state.state_tensors             optimizer state by parameter name, for checkpoints

One step of training with these functions:

    norm = clip_gradients(model.parameters(), config.optimizer.clip_grad, mesh)
    set_learning_rates(optimizer, config.optimizer.learning_rate_scheduler, step, train_steps)
    if math.isfinite(norm):
        optimizer.step()
"""
