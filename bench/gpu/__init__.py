"""Checks and measures kernels and engine on a GPU and writes one report: `python -m bench.gpu`.

case              a drawn problem for a kernel and its exact answer, in NumPy
cases/            how the problems of each operation are drawn
numerics          every variant on drawn cases against that answer
architectures     whole steps of tiny models, beside the CPU executor and in turn
architecture_shapes  which models these are
expected_logits   what the CPU executor says of them, made ahead
drawn_models      models of drawn weights in memory
k_blocks          rows rounded to K-quants
teacher_steps     steps through fixed texts, and the logits they give
model_kernels     which kernels a model runs on
decode_bandwidth  decode attention beside a device copy
decode_rivals     others' decode attention on the same rows
prefill_speed     operations a second of prefill attention
prefill_rivals    others' prefill attention on the same rows
latent_shapes     those of attention over latents, of decode and prompts
dense_bandwidth   products with dense weights beside the copy, and what they replace
matmul_bandwidth  products with quantised weights beside the copy
matmul_rivals     torch's products of the same size
expert_speed      mixtures of experts beside what their weights take
recurrence_speed  layers with states beside the copy
small_launches    launches that few architectures have, copies of states
device            kernels on the device, and how long its work takes
engine_steps      decode steps of the whole executor: with graphs, without, beside the memory
step_ways         which steps, and the ways in which an executor computes them
step_answers      what it says of some prompts: the same in ways that promise equal bits
step_profile      where the time of a step goes
launch_costs      what a launch costs, whatever it launches
engine_serving    both planes and a client: how busy the device is, tokens a second
engine_rival      transformers' continuous batching on the same model
random_model      a Llama of random weights, made on the spot
sanitizers        kernels watched by compute-sanitizer
suites            the black-box tests on the device
kernel_parts      what the report says of kernels
recurrence_parts  what it says of layers with states
findings          what a part has found so far
one_by_one        cases and shapes of a part: none that fails takes the others with it
part_process      a part in a process of its own, within its time
report            what all parts found, in one run or several
needed_kernels    which kernels that takes, built where there is no GPU
bundle            what a GPU machine without a network lacks, packed
bundled_packages  which Python packages these are
flashinfer_modules  FlashInfer with its kernels compiled ahead
pieces            a file in pieces of a limited size
provenance        what machine and which versions a report is of
"""
