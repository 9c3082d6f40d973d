//! [`DeviceProfile`]: what was measured on a device, from which a table is made; and its form as bytes (`.lsp`).
//!
//! The unit of measurement is a [`Visit`]: one layer of one token under one plan. All that the paper profiles is in it:
//! T^I, T^II, C^{G,I}, C^{G,II} and a sample of R_{n+1} (3.2.3). What is said of layers, states and plans is derived from
//! visits where it is needed, so a profile that was stopped is a smaller profile, and one that is continued has more.
//!
//! | content (see `seal`) | as |
//! |---|---|
//! | target: bundle, device, settings | u64; u32 bytes, UTF-8 each |
//! | disk: latency; points | f32; u32, then u32 bytes, u32 depth, f32 bytes/s each |
//! | memory: bytes/s | f32 |
//! | kernels | u32, then u32 blocks, u32 segments, f32 us each |
//! | coordination: us a segment of computation, of I/O | f32 each |
//! | layers: bytes computed | u32, then u64 each |
//! | visits | u32, then u16 layer, 8 bytes plan, u64 R_n, f32 T^I, f32 T^II, u64 C^{G,II}, u64 R_{n+1} each |

use crate::error::ControlError;
use crate::lut::MAX_LAYERS;
use crate::plan::CoordinationPlan;
use crate::seal::{Form, Reader, Writer};
use crate::target::Target;
use ls_bundle::ids::LayerId;

/// Bins of C^{G,II}, equal shares of a layer's work.
pub const WORK_BINS: usize = 16;
/// Visits of a profile, at most.
pub const MAX_VISITS: usize = 1 << 20;
/// Points of each curve, at most.
const MAX_POINTS: usize = 1 << 10;
/// Bytes of a layer's FFN are below this, by the limits of a bundle.
const MAX_WORK_BYTES: u64 = 1 << 40;
const POINT_BYTES: usize = 12;
const VISIT_BYTES: usize = 42;

static FORM: Form = Form { name: "device profile", magic: b"LSPR", version: 1 };

/// One layer of one token. Bytes are of weights that the token computes: at most the layer's C^G.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Visit {
    /// n.
    pub layer: LayerId,
    /// φ.
    pub plan: CoordinationPlan,
    /// R_n: bytes that were selected and not loaded when the layer before ended.
    pub remaining_bytes: u64,
    /// T^I: from then until they were loaded.
    pub first_us: f32,
    /// T^II: from there until all was computed.
    pub second_us: f32,
    /// C^{G,II}: bytes of weights computed in Interval II.
    pub left_bytes: u64,
    /// R_{n+1}: bytes of the next layer, as it was selected in the end, that were not loaded yet.
    pub next_remaining_bytes: u64,
}

impl Visit {
    /// Time of the layer.
    #[must_use]
    pub fn total_us(&self) -> f64 {
        f64::from(self.first_us) + f64::from(self.second_us)
    }
}

/// Reads of one shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskPoint {
    /// Bytes of a read.
    pub request_bytes: u32,
    /// Reads in flight.
    pub depth: u32,
    /// What came back.
    pub bytes_per_s: f32,
}

/// A layer's kernel on so many blocks, in so many calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelPoint {
    /// Blocks computed.
    pub blocks: u32,
    /// Calls that they were cut into.
    pub segments: u32,
    /// Time of all.
    pub time_us: f32,
}

/// What was measured on a device. See the module's documentation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceProfile {
    /// Where, of what, and how.
    pub target: Target,
    /// Median time of one small read alone.
    pub disk_latency_us: f32,
    /// The disk's curve.
    pub disk: Vec<DiskPoint>,
    /// Sequential reads of memory by all threads.
    pub memory_bytes_per_s: f32,
    /// The kernel's curve.
    pub kernels: Vec<KernelPoint>,
    /// Cost of a point of computation: flags, partial results.
    pub compute_point_us: f32,
    /// Cost of a point of I/O: flags, prediction, ordering.
    pub io_point_us: f32,
    /// C^G of each layer: bytes of weights computed for a token.
    pub work_bytes: Vec<u64>,
    /// Visits, in the order in which they were made.
    pub visits: Vec<Visit>,
}

impl DeviceProfile {
    /// The bin of a residual work of `left_bytes` of `work_bytes`.
    #[must_use]
    pub fn work_bin(left_bytes: u64, work_bytes: u64) -> usize {
        (left_bytes * WORK_BINS as u64 / work_bytes.max(1)).min(WORK_BINS as u64 - 1) as usize
    }

    /// The first thing that contradicts the rest: what, what was found, what was wanted.
    fn flaw(&self) -> Option<(&'static str, String, String)> {
        let within = |what, found: usize, low: usize, high: usize| {
            let wrong = !(low..=high).contains(&found);
            wrong.then(|| (what, found.to_string(), format!("{low} to {high}")))
        };
        let most = self.work_bytes.iter().copied().max().unwrap_or(0);
        let below = format!("below {MAX_WORK_BYTES}");
        within("layers", self.work_bytes.len(), 1, MAX_LAYERS)
            .or_else(|| within("points of the disk", self.disk.len(), 0, MAX_POINTS))
            .or_else(|| within("points of kernels", self.kernels.len(), 0, MAX_POINTS))
            .or_else(|| within("visits", self.visits.len(), 0, MAX_VISITS))
            .or_else(|| {
                let wrong = most >= MAX_WORK_BYTES;
                wrong.then(|| ("bytes of a layer", most.to_string(), below))
            })
            .or_else(|| self.visits.iter().find_map(|visit| self.flaw_of(visit)))
    }

    /// The first thing that is wrong with a visit.
    pub(crate) fn flaw_of(&self, visit: &Visit) -> Option<(&'static str, String, String)> {
        let layers = self.work_bytes.len();
        let Some(&work) = self.work_bytes.get(visit.layer.index()) else {
            return Some(("layer of a visit", visit.layer.to_string(), format!("below {layers}")));
        };
        let next = self.work_bytes[(visit.layer.index() + 1) % layers];
        let bytes = [
            ("remaining bytes of a visit", visit.remaining_bytes, work),
            ("left bytes of a visit", visit.left_bytes, work),
            ("next remaining bytes of a visit", visit.next_remaining_bytes, next),
        ];
        let (what, found, most) = bytes.into_iter().find(|(_, found, most)| found > most)?;
        Some((what, found.to_string(), format!("at most {most}")))
    }

    /// The profile as bytes.
    ///
    /// # Panics
    /// If it contradicts itself: a visit of no layer, more bytes than a layer has, too many of anything.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        assert!(self.target.is_sound(), "short texts");
        if let Some((what, found, wanted)) = self.flaw() {
            panic!("unusable device profile: {what}: {found} found, {wanted} wanted");
        }
        let mut to = FORM.writer();
        self.target.write(&mut to);
        to.f32(self.disk_latency_us);
        to.count(self.disk.len());
        for point in &self.disk {
            to.u32(point.request_bytes);
            to.u32(point.depth);
            to.f32(point.bytes_per_s);
        }
        to.f32(self.memory_bytes_per_s);
        to.count(self.kernels.len());
        for point in &self.kernels {
            to.u32(point.blocks);
            to.u32(point.segments);
            to.f32(point.time_us);
        }
        to.f32(self.compute_point_us);
        to.f32(self.io_point_us);
        to.count(self.work_bytes.len());
        self.work_bytes.iter().for_each(|&bytes| to.u64(bytes));
        to.count(self.visits.len());
        self.visits.iter().for_each(|visit| visit.write(&mut to));
        to.seal()
    }

    /// Reads what [`DeviceProfile::to_bytes`] gives.
    ///
    /// # Errors
    /// If the bytes are anything else.
    pub fn from_bytes(bytes: &[u8]) -> Result<DeviceProfile, ControlError> {
        let mut from = FORM.reader(bytes)?;
        let from = &mut from;
        let profile = DeviceProfile {
            target: Target::read(from)?,
            disk_latency_us: from.measured("latency of the disk")?,
            disk: list(from, "points of the disk", [0, MAX_POINTS], POINT_BYTES, |from| {
                Ok(DiskPoint {
                    request_bytes: from.u32()?,
                    depth: from.u32()?,
                    bytes_per_s: from.measured("speed of the disk")?,
                })
            })?,
            memory_bytes_per_s: from.measured("speed of memory")?,
            kernels: list(from, "points of kernels", [0, MAX_POINTS], POINT_BYTES, |from| {
                Ok(KernelPoint {
                    blocks: from.u32()?,
                    segments: from.u32()?,
                    time_us: from.measured("time of a kernel")?,
                })
            })?,
            compute_point_us: from.measured("cost of a point of computation")?,
            io_point_us: from.measured("cost of a point of I/O")?,
            work_bytes: list(from, "layers", [1, MAX_LAYERS], 8, Reader::u64)?,
            visits: list(from, "visits", [0, MAX_VISITS], VISIT_BYTES, Visit::read)?,
        };
        from.end()?;
        match profile.flaw() {
            None => Ok(profile),
            Some((what, found, wanted)) => Err(from.wrong(what, found, wanted)),
        }
    }
}

fn list<'a, T>(
    from: &mut Reader<'a>,
    what: &'static str,
    [least, most]: [usize; 2],
    item_bytes: usize,
    item: impl Fn(&mut Reader<'a>) -> Result<T, ControlError>,
) -> Result<Vec<T>, ControlError> {
    let count = from.count(what, least, most, item_bytes)?;
    (0..count).map(|_| item(from)).collect()
}

impl Visit {
    fn write(&self, to: &mut Writer) {
        to.u16(self.layer.0);
        to.plan(&self.plan);
        to.u64(self.remaining_bytes);
        to.f32(self.first_us);
        to.f32(self.second_us);
        to.u64(self.left_bytes);
        to.u64(self.next_remaining_bytes);
    }

    fn read(from: &mut Reader<'_>) -> Result<Visit, ControlError> {
        Ok(Visit {
            layer: LayerId(from.u16()?),
            plan: from.plan()?,
            remaining_bytes: from.u64()?,
            first_us: from.measured("time of a visit")?,
            second_us: from.measured("time of a visit")?,
            left_bytes: from.u64()?,
            next_remaining_bytes: from.u64()?,
        })
    }
}
