//! What a lookup takes, and what making a table takes, at the size of a small model: 30 layers, all 65,537 plans.
//!
//! `cargo bench -p ls-control`
//!
//! Kept results: 2 virtual cores of an AMD EPYC (Zen 4), others at work on both, November 2026. All of it takes 6 s of
//! processor time; a lookup 5 to 20 ns; the table 4.8 KB, with 27 different plans. The device is made up: what the table
//! is expected to gain there (16.9 ms a token, best static plan 17.7, fixed 19.0, one shot 20.1) says nothing of others.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use ls_bundle::ids::{ByteCount, LayerId};
use ls_control::Controller;
use ls_control::execution::Costs;
use ls_control::explore::{Enough, candidates, explore};
use ls_control::fit::Fit;
use ls_control::profile::DeviceProfile;
use ls_control::synthesis::{Options, synthesize};
use ls_control::world::{World, WorldLayer};
use std::hint::black_box;
use std::time::Instant;

const LAYERS: usize = 30;
const VISITS: usize = 60_000;
const LOOKUPS: u64 = 10_000_000;

fn main() {
    let layer = |layer: u64| WorldLayer {
        costs: Costs {
            lead_us: 150.0,
            read_us: 80.0,
            read_us_per_byte: 1e-3,
            read_us_per_segment: 15.0,
            compute_us_per_byte: 3e-4,
            compute_us_per_segment: 12.0,
        },
        work_bytes: 1 << 20,
        missing_bytes: (0..100).map(|i| i * (100 * layer + 6_000)).collect(),
        useful: [0.3, 0.6],
    };
    let mut world = World::new((0..LAYERS as u64).map(layer).collect(), 1);
    let mut profile = DeviceProfile::default();
    let never = Enough { samples: u32::MAX, ..Enough::DEFAULT };
    let Ok(_) = explore(&mut world, &mut profile, &candidates(), never, |p| p.visits < VISITS);
    let start = Instant::now();
    let fit = Fit::new(&profile);
    println!("fit to {VISITS} visits: {:.2} s, {:?}", start.elapsed().as_secs_f64(), fit.error);
    let options = Options::default();
    let start = Instant::now();
    let synthesis = synthesize(&profile, &options);
    println!("fit and recursion: {:.2} s", start.elapsed().as_secs_f64());
    let (lut, report) = synthesis.lut();
    println!("with the best static plan: {:.2} s", start.elapsed().as_secs_f64());
    println!("{report:?}");
    println!("{} plans, {} bytes", lut.plans(), lut.to_bytes().len());
    let start = Instant::now();
    for lookup in 0..LOOKUPS {
        let layer = LayerId((lookup % LAYERS as u64) as u16);
        black_box(lut.plan(layer, ByteCount(lookup * 7919 % (1 << 20))));
    }
    println!("a lookup: {:.1} ns", start.elapsed().as_secs_f64() * 1e9 / LOOKUPS as f64);
}
