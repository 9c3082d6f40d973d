//! Which policies run a model: [`PolicyArgs`] from the command line, [`System`] what they and the bundle amount to.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use ls_bundle::Bundle;
use ls_bundle::tables::TableKind;
use ls_engine::system::{
    Admit, Cadence, Choice, Columns, ComputeOrder, ControllerKind, Eviction, LoadOrder,
    PredictorKind, Prefetch, Refiner, Share, System as Row,
};

/// Where neither flags nor bundle say.
const DEFAULT_SHARE: f32 = 0.2;

/// Accepts the names of a choice's values.
pub(crate) fn named<T: Choice + Send + Sync>() -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(T::ALL.iter().map(|(_, name)| *name))
        .map(|name| T::named(&name).expect("only names are accepted"))
}

/// Who decides what runs, what is read and what stays. A system is a row of choices; each can be made alone.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PolicyArgs {
    /// A row of choices. [default: what the bundle was prepared for]
    #[arg(long, value_name = "SYSTEM", value_parser = named::<Row>())]
    pub(crate) system: Option<Row>,
    /// Share of each layer's neurons that does not run exactly (80%). [default: the bundle's, or 80%]
    #[arg(long, value_name = "SHARE", value_parser = crate::args::parse_share)]
    pub(crate) sparsity: Option<f64>,
    /// Run blocks in the order of the file: the same bits whatever threads, budget or timing. Dense always does.
    #[arg(long)]
    pub(crate) canonical: bool,
    /// Who says early what a layer will want.
    #[arg(long, value_name = "KIND", value_parser = named::<PredictorKind>(), hide_short_help = true)]
    predictor: Option<PredictorKind>,
    /// How often: once a layer, or again after each stage.
    #[arg(long, value_name = "WHEN", value_parser = named::<Cadence>(), hide_short_help = true)]
    cadence: Option<Cadence>,
    /// Who says at last, from the FFN's true input, what runs.
    #[arg(long, value_name = "KIND", value_parser = named::<Refiner>(), hide_short_help = true)]
    refiner: Option<Refiner>,
    /// Which streamed blocks stay in memory.
    #[arg(long, value_name = "POLICY", value_parser = named::<Eviction>(), hide_short_help = true)]
    eviction: Option<Eviction>,
    /// Whether a missing block may itself be what goes.
    #[arg(long, value_name = "HOW", value_parser = named::<Admit>(), hide_short_help = true)]
    admission: Option<Admit>,
    /// Whether layers share the room for blocks.
    #[arg(long, value_name = "HOW", value_parser = named::<Share>(), hide_short_help = true)]
    sharing: Option<Share>,
    /// Who cuts a layer into segments. [default: lut, where `ls-run tune` has made a table; else fixed]
    #[arg(long, value_name = "KIND", value_parser = named::<ControllerKind>(), hide_short_help = true)]
    pub(crate) controller: Option<ControllerKind>,
    /// In which order missing blocks are read.
    #[arg(long, value_name = "ORDER", value_parser = named::<LoadOrder>(), hide_short_help = true)]
    load_order: Option<LoadOrder>,
    /// In which order blocks run.
    #[arg(long, value_name = "ORDER", value_parser = named::<ComputeOrder>(), hide_short_help = true)]
    compute_order: Option<ComputeOrder>,
    /// Whether the next layer's blocks are read ahead.
    #[arg(long, value_name = "WHEN", value_parser = named::<Prefetch>(), hide_short_help = true)]
    prefetch: Option<Prefetch>,
    /// How many octaves of importance a block in memory is favoured by when neurons are chosen; has a price in quality.
    #[arg(long, value_name = "OCTAVES", hide_short_help = true, value_parser = crate::args::parse_non_negative)]
    cache_bias: Option<f32>,
}

/// What the flags and the bundle ask for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct System {
    row: Row,
    /// None: dense.
    pub(crate) columns: Option<Columns>,
}

impl System {
    /// The flags first; then what the bundle was prepared for; dense otherwise.
    #[must_use]
    pub(crate) fn of(args: &PolicyArgs, bundle: &Bundle) -> System {
        let first = bundle.model().layer_ids().next();
        let has_base =
            first.is_some_and(|layer| bundle.tables().find(layer, TableKind::Base).is_some());
        let settings = bundle.settings();
        let default = match settings {
            Some(settings) if settings.exact_share < 1.0 && has_base => Row::LeanStreamBase,
            _ if args.sparsity.is_some() => Row::LeanStreamBase,
            _ => Row::Dense,
        };
        let exact_share = match args.sparsity {
            Some(sparsity) => 1.0 - sparsity as f32,
            None => settings.map_or(DEFAULT_SHARE, |settings| settings.exact_share),
        };
        let row = args.system.unwrap_or(default);
        let columns = Columns::of(row, exact_share).map(|columns| {
            let columns = args.over(columns);
            if args.canonical { columns.canonical() } else { columns }
        });
        System { row, columns }
    }

    /// The row's name.
    #[must_use]
    pub(crate) fn name(&self) -> &'static str {
        self.row.name()
    }

    /// For reports.
    #[must_use]
    pub(crate) fn describe(&self) -> serde_json::Value {
        let mut object = serde_json::json!({"system": self.row.name()});
        if let Some(columns) = &self.columns {
            for (column, name) in columns.names() {
                object[column] = name.into();
            }
            object["exact_share"] = columns.exact_share.into();
            object["cache_bias"] = columns.cache_bias.into();
        }
        object
    }
}

impl PolicyArgs {
    /// `columns` with the choices that were made alone.
    fn over(&self, row: Columns) -> Columns {
        Columns {
            predictor: self.predictor.unwrap_or(row.predictor),
            cadence: self.cadence.unwrap_or(row.cadence),
            refiner: self.refiner.unwrap_or(row.refiner),
            eviction: self.eviction.unwrap_or(row.eviction),
            admission: self.admission.unwrap_or(row.admission),
            sharing: self.sharing.unwrap_or(row.sharing),
            controller: self.controller.unwrap_or(row.controller),
            load_order: self.load_order.unwrap_or(row.load_order),
            compute_order: self.compute_order.unwrap_or(row.compute_order),
            prefetch: self.prefetch.unwrap_or(row.prefetch),
            exact_share: row.exact_share,
            cache_bias: self.cache_bias.unwrap_or(row.cache_bias),
        }
    }
}
