//! The commands. Results go to stdout, as text or JSON; everything else goes to stderr.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod plan;
pub(crate) mod profile;
pub(crate) mod sync;
pub(crate) mod verify;

use ls_cache::Counts;
use ls_engine::Engine;
use ls_engine::memory::MemoryPlan;
use ls_engine::stats::Audit;
use std::io::Write;

/// Prints one JSON object and a newline.
pub(crate) fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, value).map_err(std::io::Error::from)?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}

/// The plan's figures under the names that every command's JSON uses.
pub fn plan_json(plan: &MemoryPlan) -> serde_json::Value {
    serde_json::json!({
        "memory_budget_bytes": plan.budget.0,
        "planned_bytes": plan.planned().0,
        "fixed_bytes": plan.fixed.0,
        "kv_cache_bytes": plan.kv_cache.0,
        "activation_bytes": plan.activations.0,
        "io_buffer_bytes": plan.io_buffers.0,
        "resident_dense_bytes": plan.resident_dense.0,
        "resident_ffn_bytes": plan.resident_ffn.0,
        "table_bytes": plan.tables.0,
        "slots": plan.slots,
        "weight_bytes": plan.weights.0,
        "context": plan.context,
        "pass_tokens": plan.pass_tokens,
        "request_bytes": plan.request_bytes,
        "io_depth": plan.depth,
        "read_cost_bytes": plan.merge.map_or(0, |merge| merge.read_cost_bytes),
    })
}

/// What sparse decode did since the engine was opened, all layers together; no fields if decode is dense.
pub(crate) fn sparse_json(engine: &Engine) -> serde_json::Value {
    let Some(counts) = engine.cache_counts() else { return serde_json::json!({}) };
    let (mut wanted, mut reads, mut expected, mut predictions) = (0, 0, 0, 0);
    let (mut stalled_s, mut predicting_s) = (0.0, 0.0);
    let audit = audit(engine);
    let by_layer = |count: fn(&Counts) -> u64| -> Vec<u64> {
        engine.layer_stats().map(|(_, counts)| count(&counts)).collect()
    };
    for (layer, _) in engine.layer_stats() {
        wanted += layer.wanted_bytes;
        reads += layer.wanted_reads;
        expected += layer.expected_bytes;
        predictions += layer.predictions;
        stalled_s += layer.stalled.as_secs_f64();
        predicting_s += layer.predicting.as_secs_f64();
    }
    let (prefetched_tokens, _) = engine.prefetched_tokens();
    serde_json::json!({
        "wanted_bytes": wanted,
        "wanted_reads": reads,
        "prefetched_bytes": expected,
        "demand_hits": counts.demand_hits,
        "prefetch_hits": counts.prefetch_hits,
        "misses": counts.misses,
        "prefetched_in_vain": counts.prefetched_in_vain,
        "demand_hits_by_layer": by_layer(|counts| counts.demand_hits),
        "prefetch_hits_by_layer": by_layer(|counts| counts.prefetch_hits),
        "misses_by_layer": by_layer(|counts| counts.misses),
        "demand_hit_ratio": counts.demand_hit_ratio(),
        "ffn_stalled_s": stalled_s,
        "predicting_s": predicting_s,
        "predictions": predictions,
        "prefetched_tokens": prefetched_tokens,
        "slots_read_in_place": engine.reads_slots_in_place(),
        "recall": audit.recall(),
        "importance_captured": audit.captured(),
    })
}

/// What its choices came to, held against a dense run; nothing was if none was recorded.
fn audit(engine: &Engine) -> Audit {
    let mut audit = Audit::default();
    engine.layer_stats().for_each(|(layer, _)| audit += layer.audit);
    audit
}

/// The same for people.
pub(crate) fn print_audit(engine: &Engine) -> anyhow::Result<()> {
    let audit = audit(engine);
    let (Some(recall), Some(captured)) = (audit.recall(), audit.captured()) else { return Ok(()) };
    print_line(&format!(
        "of the blocks that a dense run wants most {:.1} % were chosen, {:.1} % by importance",
        100.0 * recall,
        100.0 * captured
    ))
}

/// Adds the fields of `more` to the object `to`.
pub(crate) fn extend(to: &mut serde_json::Value, more: serde_json::Value) {
    if let (serde_json::Value::Object(to), serde_json::Value::Object(more)) = (to, more) {
        to.extend(more);
    }
}

/// Prints one line of a result.
pub(crate) fn print_line(line: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}
