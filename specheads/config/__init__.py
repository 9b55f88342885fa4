"""Every setting of specheads, typed, with its default and its range; Hydra composes, this checks.

Only entry points see a ``DictConfig``. Everything below them takes these dataclasses. Importing
this package must stay cheap: no torch, no transformers (``--help`` answers at once), and no Hydra:
the library imports it for its errors, and runs where Hydra is not installed.
"""

# ruff: noqa: F401 (what stands here is offered)

from specheads.config.commands import (
    AutoConfig,
    BenchConfig,
    ChatConfig,
    CompareConfig,
    DecodeConfig,
    DoctorConfig,
    ExportConfig,
    GenerateConfig,
    InitConfig,
    PlanConfig,
    PreviewConfig,
    QualityConfig,
    QuestionsConfig,
    RegenerateConfig,
    ServeConfig,
    SpecBenchConfig,
    TreeSearchConfig,
)
from specheads.config.compose import export_of, register_schemas, to_config
from specheads.config.data import DataConfig, FeaturesConfig, mixture_parts
from specheads.config.training import (
    AdapterConfig,
    CheckpointConfig,
    EvaluateConfig,
    HeadsConfig,
    LogConfig,
    LossConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    TrainConfig,
    TreeConfig,
)
from specheads.system.errors import DTYPES, ConfigError, InterruptedRunError, RunError, dtype_name
