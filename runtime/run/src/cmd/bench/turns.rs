//! `ls-run bench --controllers`: the same tokens under several controllers, by turns on one engine.

use crate::args::BenchArgs;
use crate::cmd::profile;
use crate::exit::UsageError;
use crate::session::Session;
use crate::system::System;
use crate::tuning;
use ls_control::{Hindsight, Lut};
use ls_engine::Engine;
use ls_engine::system::{Choice, ControllerKind};

/// Opens the bundle, with the table that any of the controllers wants.
pub(super) fn open(args: &BenchArgs) -> anyhow::Result<Session> {
    let kinds = &args.controllers;
    let mut run = args.run.clone();
    if let Some(&first) = kinds.first() {
        let wants = kinds.iter().any(|&kind| tuning::wants_table(kind));
        run.policies.controller = Some(if wants { ControllerKind::Lut } else { first });
    }
    let session = Session::open(&run)?;
    let unfit = |kind: &ControllerKind| tuning::wants_table(*kind) && session.table.is_none();
    let problem = if kinds.is_empty() {
        None
    } else if session.system.columns.is_none() {
        Some("--controllers are for sparse systems: dense decode plans nothing")
    } else if kinds.iter().any(unfit) {
        Some("the table beside the bundle does not fit: `ls-run tune` makes another")
    } else if knows_all(args) && args.text.is_none() {
        Some("hindsight wants --text: it plans for tokens that come again")
    } else {
        None
    };
    problem.map_or(Ok(session), |problem| Err(UsageError(problem.into()).into()))
}

/// How often the script is decoded.
pub(super) fn runs(args: &BenchArgs) -> u32 {
    args.reps * args.controllers.len().max(1) as u32 + u32::from(knows_all(args))
}

/// All repetitions, each with every controller; which of them begins takes turns too.
pub(super) fn turns(args: &BenchArgs) -> impl Iterator<Item = (u32, Option<ControllerKind>)> {
    let kinds = &args.controllers;
    let many = kinds.len().max(1);
    (0..args.reps).flat_map(move |rep| {
        (0..many).map(move |turn| (rep, kinds.get((turn + rep as usize) % many).copied()))
    })
}

/// What came of turns, in tokens a second: for each controller the median, the spread, and the median of its ratios to the
/// first controller's turn in the same repetition.
pub(super) fn summary(args: &BenchArgs, rates: &[f64]) -> Vec<String> {
    let kinds = &args.controllers;
    // By controller, as they were given: turns begin with another one each time.
    let of = |index: usize| {
        let reps = rates.chunks(kinds.len()).enumerate();
        reps.map(move |(rep, rates)| rates[(index + kinds.len() - rep % kinds.len()) % kinds.len()])
    };
    let tell = |(index, kind): (usize, &ControllerKind)| {
        let mut own: Vec<f64> = of(index).collect();
        let mut ratios: Vec<f64> = of(index).zip(of(0)).map(|(own, first)| own / first).collect();
        own.sort_by(f64::total_cmp);
        ratios.sort_by(f64::total_cmp);
        let median = own.len() / 2;
        format!(
            "{:<10} median {:.2} tokens/s ({:.2} to {:.2}), {:.3} of {}",
            kind.name(),
            own[median],
            own[0],
            own[own.len() - 1],
            ratios[median],
            kinds[0].name()
        )
    };
    kinds.iter().enumerate().map(tell).collect()
}

/// Whether what a run took is to be known before another.
fn knows_all(args: &BenchArgs) -> bool {
    args.controllers.contains(&ControllerKind::Hindsight)
}

/// What controllers are made of.
pub(super) struct Controllers {
    table: Option<Lut>,
    hindsight: Option<Hindsight>,
}

impl Controllers {
    /// For hindsight the script is decoded once under the table.
    pub(super) fn new(
        args: &BenchArgs,
        table: Option<Lut>,
        engine: &mut Engine,
        decode: impl FnOnce(&mut Engine) -> anyhow::Result<()>,
    ) -> anyhow::Result<Controllers> {
        let Some(known) = table.as_ref().filter(|_| knows_all(args)) else {
            return Ok(Controllers { table, hindsight: None });
        };
        let layers = engine.work_bytes().count();
        engine.keep_visits(layers * args.n_predict as usize);
        decode(engine)?;
        let trace = std::mem::take(engine.visits());
        let hindsight = profile::hindsight(&args.run.bundle, known, &trace)?;
        Ok(Controllers { table, hindsight: Some(hindsight) })
    }

    /// Gives the engine a turn's controller, if it takes turns; the system as it is then.
    pub(super) fn take(
        &self,
        kind: Option<ControllerKind>,
        mut system: System,
        engine: &mut Engine,
    ) -> System {
        if let (Some(kind), Some(columns)) = (kind, &mut system.columns) {
            columns.controller = kind;
            engine.control(match &self.hindsight {
                Some(hindsight) if kind == ControllerKind::Hindsight => Box::new(hindsight.clone()),
                _ => tuning::controller(kind, self.table.as_ref()),
            });
        }
        system
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn bench(flags: &[&str]) -> BenchArgs {
        let args = [&["ls-run", "bench", "x.lsb"], flags].concat();
        let Command::Bench(args) = Cli::parse_from(args).command else { panic!("another command") };
        args
    }

    #[test]
    fn every_controller_takes_every_place() {
        let args = bench(&["--reps", "2", "--controllers", "one-shot,fixed"]);
        let [one_shot, fixed] = [ControllerKind::OneShot, ControllerKind::Fixed].map(Some);
        let wanted = [(0, one_shot), (0, fixed), (1, fixed), (1, one_shot)];
        assert_eq!(turns(&args).collect::<Vec<_>>(), wanted);
        assert_eq!((runs(&args), runs(&bench(&["--controllers", "lut,hindsight"]))), (4, 7));
        assert_eq!(turns(&bench(&[])).collect::<Vec<_>>(), [(0, None), (1, None), (2, None)]);
    }

    #[test]
    fn turns_are_told_by_controller() {
        let args = bench(&["--reps", "3", "--controllers", "one-shot,fixed"]);
        let rate = |(rep, kind): (u32, Option<ControllerKind>)| {
            let own = if kind == Some(ControllerKind::Fixed) { 2.0 } else { 1.0 };
            own * f64::from(rep + 1)
        };
        let rates: Vec<f64> = turns(&args).map(rate).collect();
        let wanted = [
            "one-shot   median 2.00 tokens/s (1.00 to 3.00), 1.000 of one-shot",
            "fixed      median 4.00 tokens/s (2.00 to 6.00), 2.000 of one-shot",
        ];
        assert_eq!(summary(&args, &rates), wanted);
        assert!(summary(&bench(&[]), &[1.0; 3]).is_empty());
    }
}
