"""Every config key and what it means. Config files change some; the command line can change any."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """A small ODE transformer of GPT's shape, on text that every machine has."""
    config = ConfigDict()
    config.seed = 0  # of the initial parameters, the order of the examples, and dropout
    config.init_from = placeholder(str)  # finetune: the workdir of the model to start from
    config.init_step = placeholder(int)  # finetune: the checkpoint to start from; None: the newest

    config.model = model = ConfigDict()
    model.architecture = "gpt"  # gpt: LayerNorm, GELU, biases, learned positions | llama
    model.block = placeholder(str)  # f and g of a step; None: the architecture's own | the
    #   importable name of another block, "package.module:Name" or "package.module:Name(size=4)"
    #   (t5x_diffeq/blocks/README.md); architecture still sets embeddings and head
    model.weights = "time_dependent"  # W(t): time_dependent | per_layer (a baseline) | shared
    model.scheme = "euler"  # euler | lie_trotter | strang | midpoint | heun | rk4, or the
    #   importable name of an `ode.solvers.Scheme`, "package.module:name". Reversible schemes, whose
    #   backward pass needs no more memory for more steps: leapfrog | reversible:midpoint, or
    #   another of these after the colon
    model.reversibility = 0.99  # of reversible:SCHEME, the coupling of its two states, in (0, 1];
    #   rounding errors of the backward pass grow to reversibility^-N times themselves
    model.step_size = "1/N"  # dt | "1/N": an ODE on [0, 1] | "4/N", or another number: its field
    #   is so many times as large | "1": the classical residual network
    model.num_steps = 12  # N, the number of solver steps; of layers for a baseline
    model.embed_dim = 256  # width of the state
    model.num_heads = 4  # query heads
    model.num_kv_heads = placeholder(int)  # key and value heads; None: as many as query heads
    model.head_dim = placeholder(int)  # width of a head; None: embed_dim / num_heads
    model.mlp_dim = 1024  # width inside the MLP
    model.activation = placeholder(str)  # of the MLP; gpt: gelu (None; as in the official
    #   code) | relu (as in the paper's text); llama, whose MLP is gated: silu (None) | gelu
    model.time_embed_dim = 48  # T, width of each time embedding
    model.attention_time_embed_dim = placeholder(int)  # T of the layers that are named
    #   attention, with the norm before them; None: time_embed_dim
    model.time_basis = "sinusoids"  # what a time embedding reads: sinusoids of t, through two
    #   linears | K functions, of which e(t) is a linear function: legendre:K (legendre:1 is
    #   constant in t) | table:K (e itself at t = 1/K, 2/K, ..., 1, straight between)
    #   (t5x_diffeq/ode/time_features.py)
    model.num_frequencies = 64  # S, frequencies of the sinusoids
    model.time_scale = 1000.0  # factor on t in the sinusoids; t itself is a feature whatever it is
    model.time_embedding = "per_layer"  # one for each linear and norm | shared: one for all
    model.init = "invariant"  # scales of the hypernetwork | paper; t5x_diffeq/ode/hyper_init.py
    model.norm_eps = 1e-5  # epsilon of the block's norms
    model.final_norm_eps = 1e-5  # epsilon of the norm before the logits
    model.norm_shift = False  # llama: whether block norms have a shift (gpt's always do)
    model.mlp_input = "state"  # what the MLP's norm reads | attention_norm: the MLP reads
    #   the attention's normalised input
    model.norm_position = "before"  # y + f(norm(y)) | after: y + norm(f(y)), as in OLMo 2
    model.qkv_bias = False  # llama: whether q, k and v have biases (gpt's always do)
    model.qk_norm = "none"  # RMSNorm of q and k before they are rotated | head: of each head, as in
    #   Qwen3 | projection: of all heads together, as in OLMo 2
    model.rotary_base = 10000.0  # llama: base of the rotary frequencies, base^(-2i / head_dim)
    model.rotary_scaling = ()  # llama: how rotary frequencies are stretched for long sequences:
    #   (): not at all | ("linear", factor) | ("llama3", factor, low_freq_factor, high_freq_factor,
    #   original_length) | ("yarn", factor, beta_fast, beta_slow, original_length, attention_factor)
    model.tied_head = False  # llama: whether the head is the embedding table (gpt's always is)
    model.embedding_scale = 1.0  # factor on the token embeddings; Gemma has sqrt(embed_dim)
    model.position_scale = 1.0  # gpt: factor on the position embeddings. With both factors at 8,
    #   the loss depends little on the number of solver steps (launch/reproduce/depth.md)
    model.dropout_rate = 0.0  # on embeddings and on the output of attention and MLP
    model.adapter_rank = 0  # rank of the LoRA branches of per_layer kernels; 0: no branches
    model.adapter_alpha = 16.0  # a branch is scaled by alpha / rank
    model.adapter_kernels = ()  # the linears that have a branch: qkv (gpt); query, key, value
    #   (llama); output, up, gate (llama), down; (): all of them
    model.vocab_size = placeholder(int)  # None: the tokenizer's; a number must equal it
    model.dtype = "float32"  # of the computation: float32 | bfloat16; parameters are float32
    model.state_dtype = "float32"  # of the state y and the sum y + dt f | bfloat16, only with
    #   model.dtype=bfloat16: its 8 significant bits round most of a small increment dt f away
    model.quantization = "none"  # products with the block's kernels in the forward pass: none: in
    #   dtype | int8 or fp8: in 8 bits, with a scale per output of W and per token; the backward
    #   pass stays in dtype (configs/README.md)
    model.attention = "auto"  # kernel: auto (the platform's own) | xla | cudnn or triton (GPU) |
    #   splash (TPU); splash:512 also sets the size of its blocks
    model.remat = "full"  # what the backward pass recomputes instead of storing it:
    #   none: nothing; dots: everything except matrix products; full: each step, from one state
    #   per step (launch/reproduce/README.md says why there is no online checkpointing);
    #   keep:qkv,attention,mlp: each step except the named values, which are the queries, keys and
    #   values; the attention's output; the input of the MLP's activation. Reversible schemes take
    #   full, which reconstructs the states, or none
    model.scan_unroll = 1  # solver steps, up to num_steps, per iteration of the compiled loop: with
    #   more, the compiler can overlap one step's communication with the next one's computation, and
    #   takes longer
    model.pipeline_microbatches = placeholder(int)  # M: on a mesh with stages, the parts into which
    #   a batch is cut, a multiple of mesh.stage; None: as many as stages. A pass takes
    #   (M + stages - 1) / M times as long as its work

    config.data = data = ConfigDict()
    data.source = "stdlib"  # the source of Python's standard library | text_files | tfds |
    #   wikitext103 | openwebtext | huggingface | tokens (shards of prepare_data) | mixture | the
    #   importable name of a function that returns documents (t5x_diffeq/blocks/README.md)
    data.path = placeholder(str)  # text_files: a file, a folder or a glob; tokens: the folder;
    #   tfds, huggingface: a name or folder; wikitext103, openwebtext: the raw archive or its URL
    data.validation_path = placeholder(str)  # text_files: the validation text; None: the last tenth
    data.text_field = "text"  # the field of a line, row or record that holds the text
    data.loss_on = "all"  # the tokens that have a loss: all | completion: what the assistant wrote,
    #   in records with messages, or with a prompt and a completion (t5x_diffeq/data/README.md)
    data.chat_template = placeholder(str)  # a .jinja file that writes messages as text; None: the
    #   tokenizer's own (chat_template.jinja or tokenizer_config.json beside its file)
    data.data_dir = placeholder(str)  # where libraries keep datasets; None: their default
    data.train_split = "train"  # of tfds and huggingface, such as "train[:99%]"
    data.validation_split = "validation"  # likewise
    data.mixture = ()  # (weight, source, path) of each part; weights are shares of the examples
    data.tokenizer = "sentencepiece"  # trained on the data by the first run | bytes | the path of
    #   a sentencepiece model or a tokenizer.json
    data.tokenizer_vocab_size = 4096  # of a tokenizer that is trained; a short text gives fewer
    data.end_of_text = placeholder(str)  # the token that ends a document; None: the tokenizer's own
    data.sequence_length = 256  # tokens of an example
    data.tokenize = "ahead"  # all documents before the first step, into the workdir | in_loop: when
    #   they are needed. Training then starts at once and stores no tokens, but it is no faster
    #   than the tokenizer, and windows are not shuffled over all text: each row of a batch reads
    #   its own documents in order. Not with first_fit, mixtures, or fewer documents than rows
    data.packing = "concat_then_split"  # no padding | first_fit: documents stay whole where they
    #   fit, and the rest is padded; not with data.tokenize=in_loop
    data.cross_documents = False  # whether attention reaches into earlier documents
    data.read_threads = 1  # threads that read batches; the order does not depend on it

    config.train = train = ConfigDict()
    train.total_steps = 2000  # optimizer steps
    train.batch_size = 16  # sequences per step, over all devices
    train.trainable = ()  # the parts of the model to train: source, adapters, embeddings, head,
    #   final_norm; (): all of them
    train.depths = ()  # the numbers of solver steps that training draws from (repeat one to draw it
    #   more often); the model then works at these and between them. (): only model.num_steps
    train.depths_per_step = 1  # how many of them one training step uses; it takes their mean loss
    train.depths_rows = "all"  # the sequences that each of them reads | every:k: the largest all,
    #   the others every k-th | parts: each a part of its own
    train.depths_distill = 0.0  # w: the loss of the smaller ones of a step is (1 - w) cross entropy
    #   + w KL(largest || smaller)
    train.depths_until = 1.0  # the fraction of the run after which only model.num_steps is used
    train.distill_from = placeholder(str)  # the teacher: the workdir of a run with the same
    #   tokenizer, whose predictions the model learns; None: no teacher
    train.distill_step = placeholder(int)  # the teacher's checkpoint; None: the newest, which is
    #   looked up at each start
    train.distill_weight = 0.5  # w: the loss is (1 - w) cross entropy + w KL(teacher || model)
    train.microbatches = 1  # number of sequential microbatches per step
    train.eval_batch_size = 32  # sequences per evaluation batch, over all devices
    train.eval_batches = placeholder(int)  # batches per evaluation; None: the whole split
    train.eval_all_at_end = False  # whether the last evaluation takes the whole split anyway
    train.eval_averages = False  # whether the averages of train.ema_decay are evaluated, too
    train.loss_chunk = 2048  # tokens per device whose logits are in memory at once
    train.velocity_penalty = 0.0  # coefficient of the mean square of the velocity F(y; W(t)) over
    #   depth, width and the tokens that have a loss
    train.z_loss = 0.0  # coefficient of the squared log of the softmax's normaliser in the loss
    train.ema_decay = 0.0  # of exponential moving averages of the parameters, such as 0.999, for
    #   `evaluate`, `generate` and `export` --averages; smaller in the first steps; 0: none
    train.on_spike = "nothing"  # what happens if the loss or the gradient norm of a step is far
    #   above those of the steps before, or not finite | skip: its update is left out | rollback:
    #   the run goes back to its last checkpoint and on with the data after that step.
    #   With nothing, a loss or norm that isn't finite ends the run
    train.spike_deviations = 8.0  # k: a spike is more than k robust standard deviations above the
    #   median
    train.spike_window = 128  # of the loss, or of the gradient norm, of this many steps
    train.log_every = 20  # steps between reports
    train.hooks = ()  # importable names of what the loop does beside its steps, such as
    #   "package.module:Name" or "package.module:Name(every=100)" (t5x_diffeq/blocks/README.md)
    train.trackers = ("tensorboard",)  # where reports go besides metrics.jsonl: tensorboard, wandb
    #   (Weights & Biases), trackio, or several of them (t5x_diffeq/tracking/README.md)
    train.sample_every = placeholder(int)  # steps between samples of text, which go to
    #   samples.jsonl and the trackers; None: no samples
    train.sample_prompts = ("",)  # the texts that samples continue; "" begins a document
    train.figure_every = placeholder(int)  # steps between figures of the weights, which go to the
    #   trackers: the path of W(t), and spectra; None: no figures
    train.eval_every = 500  # steps between evaluations
    train.checkpoint_every = 500  # steps between checkpoints
    train.keep_checkpoints = 3  # newest checkpoints to keep; the next three keys keep others too
    train.keep_every = placeholder(int)  # keep each checkpoint whose step is a multiple of this
    train.keep_best = 0  # keep this many with the lowest eval/loss; a checkpoint has one if its
    #   step is evaluated, as with a checkpoint_every that is a multiple of eval_every
    train.milestones = ()  # steps that are saved in any case and never deleted, even if the key
    #   changes: their checkpoints get a file MILESTONE, which can be added and removed by hand
    train.local_checkpoints = placeholder(str)  # a folder on a local disk or in memory, such as
    #   /dev/shm/checkpoints, for frequent checkpoints beside those of the workdir; None: none
    train.local_checkpoint_every = 50  # steps between them; the newest two are kept
    train.verify_checkpoints = True  # compare a checkpoint's checksums before it is restored
    train.watch_every = placeholder(int)  # steps between looks inside the model: norms of gradient,
    #   weights and update of each generated layer over depth, sizes of f, g and state; None: none
    train.profile = placeholder(str)  # the optimizer steps to trace, first and last: "100:105";
    #   None: none. A run in progress traces a few when a file `profile` appears in its workdir
    train.profile_processes = (0,)  # the processes that trace
    train.memory_profile = False  # whether each trace comes with a profile of the devices' memory,
    #   which is also taken when that memory runs out
    train.hang_timeout = 1800.0  # seconds that a step may take, without compilation; after that
    #   the run ends with status 175, and launch/ starts it again
    train.compile_timeout = 7200.0  # likewise for compiling the steps
    train.eval_timeout = 43200.0  # likewise for an evaluation and for the tasks
    train.save_timeout = 7200.0  # likewise for saving or restoring a checkpoint

    config.tasks = tasks = ConfigDict()  # of lm-evaluation-harness, while the model trains
    tasks.names = ()  # such as ("lambada_openai", "piqa"); "paper": its eleven; (): none
    tasks.every = 5000  # steps between runs of the tasks, which also run at the last step
    tasks.num_fewshot = placeholder(int)  # examples in the context; None: the task's own number
    tasks.limit = placeholder(int)  # documents of each task, from the first; None: all
    tasks.include_path = placeholder(str)  # a folder with your own task files

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "adam"  # for all parameters | muon: for the block's kernels, and Adam for all
    #   others, with the same learning rate (t5x_diffeq/training/muon.py) | the importable name of a
    #   function that returns what stands in Adam's place, "package.module:make"
    #   (t5x_diffeq/training/optimizer.py)
    optimizer.learning_rate = 3e-3  # peak
    optimizer.role_multipliers = ()  # (role, factor) pairs: factors on the learning rate, and with
    #   it on the weight decay, of all parameters of a role: kernel, bias, scale, shift, embedding,
    #   time_embedding, adapter; with 0 they stay as they are
    optimizer.beta1 = 0.9  # Adam's decay of the mean of gradients
    optimizer.beta2 = 0.95  # Adam's decay of the mean of their squares
    optimizer.epsilon = 1e-8  # Adam's epsilon
    optimizer.momentum = 0.95  # Muon's decay of the mean of gradients
    optimizer.moments = "float32"  # how Adam keeps its two means (t5x_diffeq/training/moments.py)
    #   | bfloat16: rounded stochastically | int8: in blocks, for kernels of time-dependent
    #   and per-layer weights; muon takes float32 only
    optimizer.offload = False  # whether the moments, and the averages of train.ema_decay, lie in
    #   the host's memory outside the update, which takes longer for it (configs/README.md)
    optimizer.weight_decay = 0.1  # decoupled
    optimizer.decay = "kernels"  # which parameters: embeddings | kernels (and embeddings) | all
    optimizer.schedule = "cosine"  # after the warm-up: a cosine | wsd: the peak, then a cooldown,
    #   so that runs of several lengths can branch off before it (warm-up, stable, decay)
    optimizer.warmup_fraction = 0.01  # of total_steps, linear
    optimizer.cooldown_steps = placeholder(int)  # wsd: steps at the end in which the learning rate
    #   falls linearly; None: a fifth of total_steps
    optimizer.min_lr_ratio = 0.1  # learning rate at the end, relative to the peak
    optimizer.max_grad_norm = 1.0  # clip by global norm

    config.mesh = mesh = ConfigDict()
    mesh.stage = 1  # stages, each of which takes its part of the solver steps; they also split what
    #   fsdp splits of the parameters, but not the batch
    mesh.data = placeholder(int)  # devices that split the batch and replicate the parameters;
    #   None: the number of TPU slices or GPU nodes, because fsdp should not cross them (1 without
    #   several); of GPUs with too little memory for that, 1
    mesh.fsdp = -1  # devices that split the batch and the parameters; -1: all that are left
    mesh.expert = 1  # devices that split the batch and the experts of a mixture, if there is one
    mesh.context = 1  # devices that split each sequence, if one is too long for a device
    mesh.tensor = 1  # devices that split heads, MLP and vocabulary
    # The mesh axes that split each logical axis of parameters and activations. A mesh axis splits
    # an array once: in a kernel ("embed", "mlp"), fsdp splits the first axis and tensor the second.
    # Activations are split by batch, over data, fsdp and expert, and by length, over context, so
    # their width is not an "embed" axis and stays whole, as does the width of a head.
    mesh.rules = (
        ("vocab", "tensor"),  # rows of the embedding, columns of the head, logits
        ("embed", "fsdp"),  # width of the state, in parameters only; stages always split it, too
        ("heads", "tensor"),  # attention heads
        ("mlp", "tensor"),  # width inside the MLP
        ("experts", "expert"),  # experts of a mixture
        ("steps", None),  # solver steps: stacked weights are not split at rest
        ("time_embed", None),  # T: not split, so that making W(t) needs no communication
    )
    return config.lock()


# The keys that the variant after the colon of a config file sets.
_ODE = {
    "weights": "time_dependent",
    "scheme": "euler",
    "step_size": "1/N",
}
VARIANTS = {
    "ode": _ODE,
    "compact": _ODE,  # and what _set_compact sets
    "smooth": _ODE,  # and what _set_smooth sets
    "shared": {
        "weights": "shared",
        "scheme": "euler",
        "step_size": "1/N",
    },
    "baseline": {
        "weights": "per_layer",
        "scheme": "lie_trotter",
        "step_size": "1",
    },
}

_FAST_TIME_EMBEDDING = (("time_embedding", 30.0),)  # of compact and smooth
ODES = tuple(name for name, keys in VARIANTS.items() if keys["weights"] == "time_dependent")


def set_variant(config: ConfigDict, variant: str) -> ConfigDict:
    """Sets weights, scheme and step size together; returns the config.

    `compact` and `smooth` also set what the functions below say; their sizes of the time embeddings
    follow from the `model.num_steps` that the config has here.

    Raises:
      ValueError: if there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown; there are {', '.join(VARIANTS)}")
    config.model.update(VARIANTS[variant])
    if variant == "compact":
        _set_compact(config)
    if variant == "smooth":
        _set_smooth(config)
    return config


def _set_compact(config: ConfigDict) -> None:
    """Fewer functions of time than steps, in tables that learn fast: an ODE of a baseline's size.

    launch/reproduce/findings.md, "Fewer functions of time than layers", has what was measured.
    """
    steps = config.model.num_steps
    config.model.init = "invariant"
    config.model.time_basis = f"table:{steps}"
    config.model.time_embed_dim = max(steps - 1, 1)
    config.model.attention_time_embed_dim = max(steps // 3, 1)
    config.optimizer.role_multipliers = _FAST_TIME_EMBEDDING


def _set_smooth(config: ConfigDict) -> None:
    """A few polynomials of time, and embeddings so large that no single step dominates them.

    launch/reproduce/depth.md, "An ODE in fact", has what was measured.
    """
    model, count = config.model, max(config.model.num_steps // 3, 2)
    model.init = "invariant"
    model.time_basis = f"legendre:{count}"
    model.time_embed_dim = count
    model.embedding_scale = 3.0
    if model.architecture == "gpt":
        model.position_scale = 3.0
    config.optimizer.role_multipliers = _FAST_TIME_EMBEDDING
    config.train.velocity_penalty = 0.1
