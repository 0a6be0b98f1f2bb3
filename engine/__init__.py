"""One device: model, weights, page pool, runner, sampler. Knows no phase and no network."""
