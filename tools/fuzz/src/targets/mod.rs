//! The targets themselves.

mod artifact;
mod bundle;
mod datasets;
mod eval;
mod http;
mod model;
mod paper;
mod tables;
mod template;

use crate::target::Target;

pub(crate) static ALL: &[Target] = &[
    bundle::BUNDLE,
    bundle::ENGINE,
    model::GGUF,
    model::SAFETENSORS,
    model::INDEX,
    model::CONFIG,
    model::GGUF_TOKENIZER,
    model::TOKENIZER,
    model::PROMPT,
    template::TEMPLATE,
    artifact::ARTIFACT,
    artifact::RECIPE,
    tables::STACK,
    tables::MLP,
    tables::REUSE,
    tables::TRACE,
    tables::BASE,
    tables::LUT,
    tables::PROFILE,
    http::CHAT,
    http::COMPLETION,
    eval::TRUTHFULQA,
    eval::QASPER,
    eval::COQA,
    eval::QUESTIONS,
    eval::RESULTS,
    datasets::MANIFEST,
    datasets::PACKAGE,
    paper::LEDGER,
];
