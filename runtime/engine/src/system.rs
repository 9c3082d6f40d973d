//! [`Columns`]: what makes a system. The paper's systems and ours are rows of the same choices, [`Columns::of`]; each
//! choice can also be made alone. Plain data: what a choice does is told where it is made real.

use ls_control::Fixed;

/// A choice with a name for every value.
pub trait Choice: Copy + PartialEq + 'static {
    /// All values with their names.
    const ALL: &'static [(Self, &'static str)];

    /// The value's name.
    #[must_use]
    fn name(self) -> &'static str {
        let named = Self::ALL.iter().find(|(value, _)| *value == self);
        named.expect("all values are listed").1
    }

    /// The value of a name.
    #[must_use]
    fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, own)| *own == name).map(|(value, _)| *value)
    }
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$value_doc])* $value,)* }

        impl Choice for $name {
            const ALL: &'static [($name, &'static str)] = &[$(($name::$value, $text),)*];
        }
    };
}

choice! { /// What is compared with what.
System {
    /// Every neuron runs; what does not fit is streamed in the order of the file.
    Dense = "dense",
    /// A two-layer network predicts from the layer before, nothing is kept.
    DejaVu = "dejavu",
    /// The same, and what was used last is kept.
    DejaVuPlus = "dejavu+",
    /// The same prediction; hot neurons are kept, the rest is least recently used; what is there runs at once.
    PowerInfer2 = "powerinfer2",
    /// The paper's: hashing predicts again after each stage, best first, kept by predicted reuse.
    LeanStream = "leanstream",
    /// The same beside a resident low-bit base, which chooses what runs and stands in for the rest.
    LeanStreamBase = "leanstream+base",
    /// Knows what each token will want, from a first dense run over the same tokens.
    Oracle = "oracle",
} }

choice! { /// Who says early which blocks a layer will want.
PredictorKind {
    /// Nobody.
    None = "none",
    /// Stacked learnable hashing (paper, 3.3).
    Hash = "hash",
    /// A two-layer network in 8 bits, as DejaVu's.
    Mlp = "mlp",
    /// What a first run has recorded.
    Recorded = "recorded",
} }

choice! { /// How often a prediction is made.
Cadence {
    /// Once, from the residual that enters the FFN before.
    Layer = "layer",
    /// Again after each stage of the FFN before (Eq. 2).
    Stage = "stage",
} }

choice! { /// Who decides at last, from the FFN's true input, what runs.
Refiner {
    /// Nobody: what was predicted runs.
    None = "none",
    /// The low-bit base, which also stands in for neurons that do not run.
    Base = "base",
} }

choice! { /// Which blocks stay in memory.
Eviction {
    /// None do.
    None = "none",
    /// Those requested last.
    Lru = "lru",
    /// Those requested most often.
    Lfu = "lfu",
    /// Those requested often lately.
    Ema = "ema",
    /// Half of the room for those that were hot in preparation, the rest as `Lru`.
    HotPinned = "hot-pinned",
    /// Those that the bundle's table of reuse expects back soonest (paper, 3.3.3).
    Reuse = "reuse",
    /// Those wanted again soonest, from a recorded trace.
    Belady = "belady",
} }

choice! { /// Whether a block that was missing may be what goes.
Admit {
    /// It may: the best of all that was there stays.
    Compete = "compete",
    /// No: it outlives the weakest of the others.
    Always = "always",
} }

choice! { /// Whether layers share the room for blocks.
Share {
    /// Each has its own.
    Layer = "layer",
    /// All have one.
    Global = "global",
} }

choice! { /// Who says in how many segments a layer's reads and computation talk to each other (paper, 3.2.3).
ControllerKind {
    /// One: all is loaded, then computed, then the next layer predicted.
    OneShot = "one-shot",
    /// Two in each quarter of either side.
    Fixed = "fixed",
    /// The plan that is best for all layers by what was measured on this device.
    Static = "static",
    /// The table made of that: by layer, and by what is still to be loaded (Eq. 9).
    Lut = "lut",
    /// What would have been best for a run of the same tokens, by the same measurements.
    Hindsight = "hindsight",
} }

choice! { /// In which order missing blocks are read.
LoadOrder {
    /// Best first.
    Priority = "priority",
    /// As in the file.
    Address = "address",
} }

choice! { /// In which order blocks run.
ComputeOrder {
    /// As they arrive: the sum does not care.
    Arrival = "arrival",
    /// As they are read, each after the one before.
    Loaded = "loaded",
} }

choice! { /// Whether the next layer's blocks are read ahead while the disk has nothing else to do.
Prefetch {
    /// Never.
    Off = "off",
    /// Always.
    On = "on",
    /// Whichever measures faster, tried again now and then.
    Auto = "auto",
} }

/// One choice of each kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Columns {
    /// Who says early what a layer will want.
    pub predictor: PredictorKind,
    /// How often.
    pub cadence: Cadence,
    /// Who says at last what runs.
    pub refiner: Refiner,
    /// Which blocks stay.
    pub eviction: Eviction,
    /// Whether a missing block may be what goes.
    pub admission: Admit,
    /// Whether layers share room.
    pub sharing: Share,
    /// Who cuts an FFN into segments.
    pub controller: ControllerKind,
    /// Order of reads.
    pub load_order: LoadOrder,
    /// Order of computation.
    pub compute_order: ComputeOrder,
    /// Reading ahead.
    pub prefetch: Prefetch,
    /// Share of each layer's neurons that run exactly, 0 to 1; rounded up to whole blocks.
    pub exact_share: f32,
    /// How much better than a block in memory one outside has to be, in octaves of importance; 0: not at all.
    pub cache_bias: f32,
}

impl Columns {
    /// A system's row; None for the dense one, which chooses nothing.
    #[must_use]
    pub fn of(system: System, exact_share: f32) -> Option<Columns> {
        let dejavu = Columns {
            predictor: PredictorKind::Mlp,
            cadence: Cadence::Layer,
            refiner: Refiner::None,
            eviction: Eviction::None,
            admission: Admit::Always,
            sharing: Share::Layer,
            controller: ControllerKind::OneShot,
            load_order: LoadOrder::Address,
            compute_order: ComputeOrder::Loaded,
            prefetch: Prefetch::On,
            exact_share,
            cache_bias: 0.0,
        };
        let leanstream = Columns {
            predictor: PredictorKind::Hash,
            cadence: Cadence::Stage,
            eviction: Eviction::Reuse,
            admission: Admit::Compete,
            controller: ControllerKind::Lut,
            load_order: LoadOrder::Priority,
            compute_order: ComputeOrder::Arrival,
            ..dejavu
        };
        Some(match system {
            System::Dense => return None,
            System::DejaVu => dejavu,
            System::DejaVuPlus => Columns { eviction: Eviction::Lru, ..dejavu },
            System::PowerInfer2 => Columns {
                eviction: Eviction::HotPinned,
                controller: ControllerKind::Fixed,
                compute_order: ComputeOrder::Arrival,
                ..dejavu
            },
            System::LeanStream => leanstream,
            System::LeanStreamBase => Columns { refiner: Refiner::Base, ..leanstream },
            System::Oracle => Columns {
                predictor: PredictorKind::Recorded,
                eviction: Eviction::Belady,
                ..leanstream
            },
        })
    }

    /// The same, but that results depend on neither timing nor memory: everything in the order of the file, and no
    /// preference for what is in memory.
    #[must_use]
    pub fn canonical(self) -> Columns {
        Columns {
            load_order: LoadOrder::Address,
            compute_order: ComputeOrder::Loaded,
            cache_bias: 0.0,
            ..self
        }
    }

    /// Who cuts FFNs until an engine is told otherwise: the default plan where a table is wanted, which is of a device and
    /// not of the row.
    #[must_use]
    pub fn controller(&self) -> Fixed {
        match self.controller {
            ControllerKind::OneShot => Fixed::ONE_SHOT,
            ControllerKind::Fixed
            | ControllerKind::Static
            | ControllerKind::Lut
            | ControllerKind::Hindsight => Fixed::DEFAULT,
        }
    }

    /// Blocks of `blocks` that run.
    #[must_use]
    pub fn count(&self, blocks: usize) -> usize {
        // A share like 0.2 is a little more than a fifth: that shall not cost a block.
        let count = (f64::from(self.exact_share) * blocks as f64 - 1e-3).ceil() as usize;
        count.min(blocks)
    }

    /// Whether any choice needs a recording of what will be wanted.
    #[must_use]
    pub fn knows_the_future(&self) -> bool {
        self.predictor == PredictorKind::Recorded || self.eviction == Eviction::Belady
    }

    /// Whether every neuron runs.
    #[must_use]
    pub fn runs_all(&self) -> bool {
        self.exact_share >= 1.0
    }

    /// Every choice by its name.
    #[must_use]
    pub fn names(&self) -> [(&'static str, &'static str); 10] {
        [
            ("predictor", self.predictor.name()),
            ("cadence", self.cadence.name()),
            ("refiner", self.refiner.name()),
            ("eviction", self.eviction.name()),
            ("admission", self.admission.name()),
            ("sharing", self.sharing.name()),
            ("controller", self.controller.name()),
            ("load_order", self.load_order.name()),
            ("compute_order", self.compute_order.name()),
            ("prefetch", self.prefetch.name()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for &(system, name) in System::ALL {
            assert_eq!(System::named(name), Some(system));
            assert_eq!(system.name(), name);
        }
        assert_eq!(System::named("magic"), None);
    }

    #[test]
    fn a_fifth_of_blocks_is_a_fifth() {
        let columns = Columns::of(System::LeanStream, 0.2).unwrap();
        assert_eq!([5, 10, 1, 768].map(|blocks| columns.count(blocks)), [1, 2, 1, 154]);
    }

    #[test]
    fn baselines_differ_from_each_other_in_the_columns_they_are_known_for() {
        let differing = |a, b| {
            let [a, b] = [a, b].map(|system| Columns::of(system, 0.2).unwrap().names());
            let pairs = a.into_iter().zip(b).filter(|(a, b)| a != b);
            pairs.map(|(a, _)| a.0).collect::<Vec<_>>()
        };
        assert_eq!(differing(System::DejaVu, System::DejaVuPlus), ["eviction"]);
        let powerinfer = differing(System::DejaVuPlus, System::PowerInfer2);
        assert_eq!(powerinfer, ["eviction", "controller", "compute_order"]);
        assert_eq!(differing(System::LeanStream, System::LeanStreamBase), ["refiner"]);
        assert_eq!(differing(System::LeanStream, System::Oracle), ["predictor", "eviction"]);
    }
}
