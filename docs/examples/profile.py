"""One decode iteration of 16 sequences with 4,000 tokens each: ground truth and cost estimate."""

from heddle_core.ids import EngineShape
from heddle_sim.profile_files import load_profile

profile = load_profile("qwen3-14b", "h100")
truth = profile.table(tp=1)  # the simulated engine takes its times from it
shape = EngineShape("h100", 1)
estimate = profile.cost_estimate((1, 2, 4)).by_shape[shape]  # a policy plans with it
batch, context_tokens = 16, 16 * 4_000
iteration_s = truth.base_s[batch] + truth.per_context_s[batch] * context_tokens
print(f"truth    {iteration_s * 1e3:.2f} ms")
print(f"estimate {estimate.iteration_s(batch, context_tokens) * 1e3:.2f} ms")
