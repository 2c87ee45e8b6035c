"""Every key, with what it means. Experiment files change some; the command line, any of them."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """A small ODE transformer of GPT's shape, on text that every machine has."""
    config = ConfigDict()
    config.seed = 0  # decides initial parameters, the order of examples, and dropout
    config.init_from = placeholder(str)  # finetune: the workdir whose model it begins with
    config.init_step = placeholder(int)  # finetune: its checkpoint; None: the newest

    config.model = model = ConfigDict()
    model.architecture = "gpt"  # gpt: LayerNorm, GELU, biases, learned positions | llama
    model.weights = "time_dependent"  # W(t): time_dependent | per_layer (a baseline) | shared
    model.scheme = "euler"  # euler | lie_trotter | strang | midpoint | heun | rk4
    model.step_size = "1/N"  # "1/N": an ODE on [0, 1] | "1": the classical residual network
    model.num_steps = 12  # N, steps of the solver; for a baseline, its layers
    model.embed_dim = 256  # width of the state
    model.num_heads = 4  # query heads
    model.num_kv_heads = placeholder(int)  # key and value heads; None: as many as query heads
    model.mlp_dim = 1024  # width inside the MLP
    model.activation = placeholder(str)  # of the MLP; gpt: gelu (None; the official code's) | relu
    #   (the paper's text); llama: silu (None), whose MLP is gated by it
    model.time_embed_dim = 48  # T, width of each time embedding
    model.num_frequencies = 64  # S, frequencies of the time features
    model.time_scale = 1000.0  # factor on t in the sinusoids
    model.time_embedding = "per_layer"  # one per linear and norm | shared: one for all
    model.init = "invariant"  # the hypernetwork's scales: see t5x_diffeq/ode/weights.py | paper
    model.norm_eps = 1e-5  # epsilon of the block's norms
    model.final_norm_eps = 1e-5  # epsilon of the norm before the logits
    model.norm_shift = False  # llama: whether block norms have a shift (gpt's always do)
    model.mlp_input = "state"  # what the MLP reads | attention_norm: the attention's normed input
    model.dropout_rate = 0.0  # on embeddings and on the output of attention and MLP
    model.adapter_rank = 0  # of LoRA's branches beside per_layer kernels; 0: none
    model.adapter_alpha = 16.0  # a branch counts alpha / rank times
    model.adapter_kernels = ()  # linears that have one: qkv (gpt), query, key, value (llama),
    #   output, up, gate (llama), down; (): all
    model.vocab_size = placeholder(int)  # None: the tokenizer's; else must equal it
    model.dtype = "float32"  # of the computation: float32 | bfloat16; parameters are float32
    model.state_dtype = "float32"  # of the state y, and of the sum y + dt f | bfloat16: with
    #   model.dtype=bfloat16 alone. It has 8 significant bits: a step's small dt f is then mostly
    #   rounded away, the more the smaller dt is
    model.attention = "auto"  # kernel: auto (the fastest the platform has) | xla | cudnn | splash,
    #   also with the size of its blocks, splash:512, where auto's is not the best
    model.remat = "full"  # what the backward pass computes again instead of finding it stored:
    #   none: nothing; dots: all but matrix products; full: every step, from a state per step;
    #   every:k: k steps at a time, from N / k states (less memory than full only if what a step
    #   stores is smaller than these; launch/reproduce/README.md says why not online checkpointing);
    #   keep:qkv,attention,mlp: every step, but for the values of these names, or of some of them:
    #   queries, keys and values; attention's output; what goes into the MLP's nonlinearity

    config.data = data = ConfigDict()
    data.source = "stdlib"  # the running Python's standard library | text_files | tfds |
    #   wikitext103 | openwebtext | huggingface | tokens (shards of prepare_data) | mixture
    data.path = placeholder(str)  # text_files: a file, a folder or a glob; tokens: the folder;
    #   tfds, huggingface: a name or folder; wikitext103, openwebtext: the raw archive or its URL
    data.validation_path = placeholder(str)  # text_files: what validates; None: the last tenth
    data.text_field = "text"  # of a line, row or record, the field that holds the text
    data.data_dir = placeholder(str)  # where libraries keep built datasets; None: their own place
    data.train_split = "train"  # of tfds and huggingface, such as "train[:99%]"
    data.validation_split = "validation"  # likewise
    data.mixture = ()  # parts (weight, source, path); a weight is a share of the examples
    data.tokenizer = "sentencepiece"  # trained on the data on the first run | bytes | the path of
    #   a sentencepiece model or of a tokenizer.json
    data.tokenizer_vocab_size = 4096  # of a trained tokenizer
    data.end_of_text = placeholder(str)  # the token that ends a document; None: the tokenizer's own
    data.sequence_length = 256  # tokens of an example
    data.tokenize = "ahead"  # all documents before the first step, into the workdir | in_loop: as
    #   they are needed: training begins at once and keeps no tokens. It lacks windows shuffled
    #   over all text (each row of a batch reads its own documents, one behind the other, so it
    #   takes as many documents as rows), first_fit, mixtures, and any pace beyond the tokenizer's
    data.packing = "concat_then_split"  # no padding | first_fit: documents whole where they fit; it
    #   pads the rest, and needs all lengths before the first step, so not data.tokenize=in_loop
    data.cross_documents = False  # whether attention reaches into the documents before
    data.read_threads = 1  # that read batches; the order does not depend on them

    config.train = train = ConfigDict()
    train.total_steps = 2000  # optimizer steps
    train.batch_size = 16  # sequences of a step, over all devices
    train.trainable = ()  # parts of the model that train: source, adapters, embeddings, head,
    #   final_norm; (): all
    train.depths = ()  # numbers of steps that training draws from, a repeated one more often; the
    #   model then works at these and between them. (): at model.num_steps alone
    train.depths_per_step = 1  # so many of them a training step takes at once, and their mean loss
    train.depths_until = 1.0  # up to this fraction of the run; from there on model.num_steps
    train.microbatches = 1  # parts of it that go through the model one after the other
    train.eval_batch_size = 32  # sequences of an evaluation batch, over all devices
    train.eval_batches = placeholder(int)  # evaluate so many batches; None: the whole split
    train.eval_all_at_end = False  # whether the last evaluation is of the whole split all the same
    train.loss_chunk = 2048  # tokens per device whose logits exist at once
    train.z_loss = 0.0  # factor of the squared log of the softmax's normaliser in the loss
    train.log_every = 20  # steps between reports
    train.eval_every = 500  # steps between evaluations
    train.checkpoint_every = 500  # steps between checkpoints
    train.keep_checkpoints = 3  # newest checkpoints to keep
    train.verify_checkpoints = True  # compare a checkpoint's checksums before it is restored
    train.hang_timeout = 1800.0  # seconds for a step, compilation apart; a run that takes longer
    #   ends with status 175, which launch/ starts again
    train.eval_timeout = 43200.0  # likewise for an evaluation, and for the tasks
    train.save_timeout = 7200.0  # likewise for saving a checkpoint

    config.tasks = tasks = ConfigDict()  # of lm-evaluation-harness, while the model trains
    tasks.names = ()  # such as ("lambada_openai", "piqa"); "paper": its eleven; (): none
    tasks.every = 5000  # steps between runs of them; the last step has one
    tasks.num_fewshot = placeholder(int)  # examples in a context; None: the task's own number
    tasks.limit = placeholder(int)  # only the first so many documents of each; None: all
    tasks.include_path = placeholder(str)  # folder of task files of your own

    config.optimizer = optimizer = ConfigDict()
    optimizer.learning_rate = 3e-3  # peak
    optimizer.beta1 = 0.9  # Adam's decay of the mean of gradients
    optimizer.beta2 = 0.95  # Adam's decay of the mean of their squares
    optimizer.epsilon = 1e-8  # Adam's epsilon
    optimizer.moment_dtype = "float32"  # of the mean of gradients: float32 | bfloat16
    optimizer.weight_decay = 0.1  # decoupled
    optimizer.decay = "kernels"  # what decays: embeddings | kernels (and embeddings) | all
    optimizer.warmup_fraction = 0.01  # of total_steps, linear
    optimizer.min_lr_ratio = 0.1  # the last learning rate over the peak, at the cosine's end
    optimizer.max_grad_norm = 1.0  # clip by global norm

    config.mesh = mesh = ConfigDict()
    mesh.data = placeholder(int)  # devices over which batches are split and parameters repeated;
    #   None: the number of TPU slices, which fsdp should not cross (1 on one slice, and elsewhere)
    mesh.fsdp = -1  # over which batches and parameters are split; -1: all that are left
    mesh.tensor = 1  # over which heads, MLP and vocabulary are split
    # Where each logical axis of parameters and activations lies on the mesh. An axis of the mesh
    # serves once per array: of a kernel ("embed", "mlp"), fsdp splits the first and tensor the
    # second; activations are split by batch, so their width is not named "embed" but left whole.
    mesh.rules = (
        ("batch", ("data", "fsdp")),  # sequences
        ("length", None),  # tokens of a sequence: whole, because attention needs all of them
        ("vocab", "tensor"),  # rows of the embedding, columns of the head, logits
        ("embed", "fsdp"),  # width of the state, in parameters alone
        ("heads", "tensor"),  # attention heads
        ("head_dim", None),  # width of a head: whole
        ("mlp", "tensor"),  # width inside the MLP
        ("steps", None),  # steps of the solver: stacked weights are scanned, never split
        ("time_embed", None),  # T: whole, so that W(t) is made without communication
    )
    return config.lock()


# What the word after the colon of an experiment file sets, all at once.
VARIANTS = {
    "ode": {
        "weights": "time_dependent",
        "scheme": "euler",
        "step_size": "1/N",
    },
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


def set_variant(config: ConfigDict, variant: str) -> ConfigDict:
    """Sets weights, scheme and step size together; returns the config.

    Raises:
      ValueError: if there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown; there are {', '.join(VARIANTS)}")
    config.model.update(VARIANTS[variant])
    return config
