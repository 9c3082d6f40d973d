//! [`Timeline`]: what the engine did when, for people who want to look.
//!
//! Spans of the thread that drives the engine, and how many reads of blocks were in flight. All is kept in memory that
//! is allocated beforehand, until it is full; what comes later is left out. Written in the trace event format, which
//! <https://ui.perfetto.dev> opens.

use ls_bundle::ids::LayerId;
use std::io::Write;
use std::time::{Duration, Instant};

/// What a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// All of a pass; counts its tokens.
    Pass,
    /// Norm and products in front of attention, or behind it.
    Project,
    /// Attention itself.
    Attend,
    /// A layer's FFN.
    Ffn,
    /// Choosing the blocks that run; counts them. With a base it includes the base's look at all neurons.
    Select,
    /// The base stands in for the neurons that do not run.
    StandIn,
    /// Blocks run; counts them.
    Compute,
    /// Asking what the next layer will want.
    Predict,
    /// The head.
    Head,
    /// Computation waits for reads.
    Wait,
}

impl Span {
    fn name(self) -> &'static str {
        match self {
            Span::Pass => "pass",
            Span::Project => "project",
            Span::Attend => "attend",
            Span::Ffn => "ffn",
            Span::Select => "select",
            Span::StandIn => "stand in",
            Span::Compute => "compute",
            Span::Predict => "predict",
            Span::Head => "head",
            Span::Wait => "wait",
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// `took` is in nanoseconds: four seconds are long for a span.
    Span { at: Duration, took: u32, span: Span, layer: Option<LayerId>, count: u32 },
    /// Reads of blocks in flight.
    Reads { at: Duration, wanted: u32, expected: u32 },
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Timeline {
    origin: Instant,
    events: Vec<Event>,
    reads: (u32, u32),
    left_out: u64,
}

impl Timeline {
    /// Keeps nothing.
    #[must_use]
    pub fn off() -> Timeline {
        Timeline::with_capacity(0)
    }

    /// Room for `events` events. The last allocation.
    #[must_use]
    pub fn with_capacity(events: usize) -> Timeline {
        let (origin, events) = (Instant::now(), Vec::with_capacity(events));
        Timeline { origin, events, reads: (0, 0), left_out: 0 }
    }

    /// Bytes that `events` events take.
    #[must_use]
    pub const fn bytes(events: usize) -> u64 {
        (events * size_of::<Event>()) as u64
    }

    /// Events that found no room.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Time spent in spans of a kind.
    #[must_use]
    pub fn spent(&self, wanted: Span) -> Duration {
        let took = |event: &Event| match *event {
            Event::Span { took, span, .. } if span == wanted => u64::from(took),
            _ => 0,
        };
        Duration::from_nanos(self.events.iter().map(took).sum())
    }

    /// The beginning of a span; None where nothing is kept.
    pub(crate) fn begin(&self) -> Option<Instant> {
        (self.events.capacity() > 0).then(Instant::now)
    }

    /// The end of a span that began at `since`; where nothing is kept that may be known or not.
    pub(crate) fn end(
        &mut self,
        since: Option<Instant>,
        span: Span,
        layer: Option<LayerId>,
        count: usize,
    ) {
        let Some(since) = since.filter(|_| self.events.capacity() > 0) else { return };
        let took = u32::try_from(since.elapsed().as_nanos()).unwrap_or(u32::MAX);
        let at = since.duration_since(self.origin);
        self.keep(Event::Span { at, took, span, layer, count: count as u32 });
    }

    /// Reads of blocks that are in flight now.
    pub(crate) fn reads(&mut self, wanted: u32, expected: u32) {
        if self.events.capacity() > 0 && self.reads != (wanted, expected) {
            self.reads = (wanted, expected);
            self.keep(Event::Reads { at: self.origin.elapsed(), wanted, expected });
        }
    }

    fn keep(&mut self, event: Event) {
        if self.events.len() < self.events.capacity() {
            self.events.push(event);
        } else {
            self.left_out += 1;
        }
    }

    /// Writes what was kept as JSON.
    pub fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        for (index, event) in self.events.iter().enumerate() {
            if index > 0 {
                write!(out, ",")?;
            }
            let us = |at: &Duration| at.as_nanos() as f64 / 1e3;
            match event {
                Event::Span { at, took, span, layer, count } => {
                    let (ts, dur, name) = (us(at), f64::from(*took) / 1e3, span.name());
                    write!(
                        out,
                        "\n{{\"ph\":\"X\",\"pid\":1,\"tid\":1,\"ts\":{ts:.3},\"dur\":{dur:.3},\"name\":\"{name}\",\"args\":{{"
                    )?;
                    if let Some(layer) = layer {
                        write!(out, "\"layer\":{},", layer.0)?;
                    }
                    write!(out, "\"count\":{count}}}}}")?;
                }
                Event::Reads { at, wanted, expected } => write!(
                    out,
                    "\n{{\"ph\":\"C\",\"pid\":1,\"ts\":{:.3},\"name\":\"reads in flight\",\"args\":{{\"wanted\":{wanted},\"expected\":{expected}}}}}",
                    us(at)
                )?,
            }
        }
        writeln!(out, "\n]}}")
    }
}
