//! [`System`]: which policies run a model. Each is a row of choices for the one engine, never a branch in it.

use crate::args::{EvictionChoice, RunArgs, SystemChoice};
use ls_bundle::Bundle;
use ls_bundle::tables::TableKind;
use ls_cache::{Blocks, EvictionPolicy, policy};
use ls_engine::sparse::SparseOptions;

/// Decay of the moving average a token: what measured best on recorded traces.
const DECAY: f32 = 0.99;

/// What the flags and the bundle ask for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum System {
    /// Every neuron, always.
    Dense,
    /// The low-bit base chooses neurons and stands in for the others.
    Based {
        /// How they are chosen.
        options: SparseOptions,
        /// Which blocks stay in memory.
        eviction: EvictionChoice,
    },
}

impl System {
    /// The flags first; then what the bundle was prepared for; dense otherwise.
    #[must_use]
    pub(crate) fn of(args: &RunArgs, bundle: &Bundle) -> System {
        let first = bundle.model().layer_ids().next();
        let has_base =
            first.is_some_and(|layer| bundle.tables().find(layer, TableKind::Base).is_some());
        let settings = bundle.settings();
        let default = match settings {
            Some(settings) if settings.exact_share < 1.0 && has_base => SystemChoice::Based,
            _ if args.sparsity.is_some() => SystemChoice::Based,
            _ => SystemChoice::Dense,
        };
        let exact_share = match args.sparsity {
            Some(sparsity) => 1.0 - sparsity as f32,
            None => settings.map_or(DEFAULT_SHARE, |settings| settings.exact_share),
        };
        match args.system.unwrap_or(default) {
            SystemChoice::Dense => System::Dense,
            SystemChoice::Based => System::Based {
                options: SparseOptions { exact_share, canonical: args.canonical },
                eviction: args.eviction,
            },
        }
    }

    /// What the engine is given.
    #[must_use]
    pub(crate) fn policies(
        &self,
        bundle: &Bundle,
    ) -> Option<(SparseOptions, Box<dyn EvictionPolicy>)> {
        let System::Based { options, eviction } = *self else { return None };
        let ffn = bundle.weights().layers.iter().map(|layer| layer.ffn);
        let ranges = ffn.map(|ffn| ffn.first_block.0..ffn.first_block.0 + ffn.blocks());
        let blocks = Blocks::new(ranges.collect());
        let policy: Box<dyn EvictionPolicy> = match eviction {
            EvictionChoice::None => Box::new(policy::Nothing),
            EvictionChoice::Lru => Box::new(policy::Lru::new(&blocks)),
            EvictionChoice::Lfu => Box::new(policy::Lfu::new(&blocks)),
            EvictionChoice::Ema => Box::new(policy::Ema::new(&blocks, DECAY)),
        };
        Some((options, policy))
    }

    /// For reports.
    #[must_use]
    pub(crate) fn describe(&self) -> serde_json::Value {
        match self {
            System::Dense => serde_json::json!({"system": "dense"}),
            System::Based { options, eviction } => serde_json::json!({
                "system": "leanstream+base",
                "exact_share": options.exact_share,
                "canonical": options.canonical,
                "refiner": "base",
                "eviction": eviction.name(),
                "prefetch": false,
                "load_order": if options.canonical { "address" } else { "priority" },
                "compute_order": if options.canonical { "address" } else { "arrival" },
            }),
        }
    }
}

/// Where neither flags nor bundle say.
const DEFAULT_SHARE: f32 = 0.2;
