//! [`Meter`]: what sensors show while something runs, sampled by a thread of its own: `--stats`, as the paper's Table 7.

use super::Root;
use super::sensors::{Clocks, EnergySource, Temperature};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between samples: power is integrated over it, and a counter of 32 bits of microjoules lasts longer.
const INTERVAL: Duration = Duration::from_millis(100);

/// Samples until it is stopped.
#[derive(Debug)]
pub(crate) struct Meter {
    to: Sender<Order>,
    thread: JoinHandle<Sampler>,
}

#[derive(Debug)]
enum Order {
    /// Forget what was before.
    Begin,
    Stop,
}

/// What was seen.
#[derive(Clone, Debug)]
pub(crate) struct Readings {
    seconds: f64,
    first: Option<Temperature>,
    last: Option<Temperature>,
    hottest: Option<Temperature>,
    clocks: Option<Clocks>,
    joules: Option<f64>,
    source: String,
}

impl Meter {
    /// Starts sampling.
    pub(crate) fn start(root: &Root) -> Meter {
        let (to, orders) = channel();
        let mut sampler = Sampler::new(root);
        let thread = std::thread::spawn(move || {
            sampler.run(&orders);
            sampler
        });
        Meter { to, thread }
    }

    /// Begins anew, now.
    pub(crate) fn begin(&self) {
        // Who samples goes after this only.
        let _ = self.to.send(Order::Begin);
    }

    /// What was seen since it began.
    pub(crate) fn stop(self) -> Readings {
        let _ = self.to.send(Order::Stop);
        self.thread.join().expect("sampling does not panic").readings()
    }
}

#[derive(Debug)]
pub(super) struct Sampler {
    root: Root,
    source: EnergySource,
    began: Instant,
    seconds: f64,
    first: Option<Temperature>,
    last: Option<Temperature>,
    hottest: Option<Temperature>,
    /// Sum of means, and how many they are.
    clocks: Option<(Clocks, f64)>,
    joules: Option<f64>,
    /// When power was read last, and what it was.
    power: Option<(f64, f64)>,
    /// What counters showed last.
    counters: Vec<Option<u64>>,
}

impl Sampler {
    pub(super) fn new(root: &Root) -> Sampler {
        let mut sampler = Sampler {
            root: root.clone(),
            source: root.energy_source(),
            began: Instant::now(),
            seconds: 0.0,
            first: None,
            last: None,
            hottest: None,
            clocks: None,
            joules: None,
            power: None,
            counters: Vec::new(),
        };
        sampler.sample(0.0);
        sampler
    }

    fn run(&mut self, orders: &Receiver<Order>) {
        loop {
            match orders.recv_timeout(INTERVAL) {
                Err(RecvTimeoutError::Timeout) => self.sample(self.began.elapsed().as_secs_f64()),
                Ok(Order::Begin) => {
                    self.forget();
                    self.sample(0.0);
                }
                Ok(Order::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    return self.sample(self.began.elapsed().as_secs_f64());
                }
            }
        }
    }

    fn forget(&mut self) {
        self.began = Instant::now();
        (self.first, self.last, self.hottest, self.clocks) = (None, None, None, None);
        (self.joules, self.power) = (None, None);
        self.counters.clear();
    }

    /// Looks at all sensors, `at` seconds after the beginning.
    pub(super) fn sample(&mut self, at: f64) {
        self.seconds = at;
        if let Some(now) = self.root.temperature() {
            self.first.get_or_insert_with(|| now.clone());
            if self.hottest.as_ref().is_none_or(|before| now.celsius > before.celsius) {
                self.hottest = Some(now.clone());
            }
            self.last = Some(now);
        }
        if let Some(now) = self.root.clocks() {
            let (mut all, count) = self.clocks.unwrap_or((now, 0.0));
            let sum = if count > 0.0 { all.mean + now.mean } else { now.mean };
            all =
                Clocks { least: all.least.min(now.least), mean: sum, most: all.most.max(now.most) };
            self.clocks = Some((all, count + 1.0));
        }
        match self.source.clone() {
            EnergySource::Counters(files) => self.count(&files),
            EnergySource::Rails(rails) => {
                let watts = rails.iter().map(|rail| self.root.power(rail)).sum::<Option<f64>>();
                self.integrate(at, watts);
            }
            EnergySource::None => {}
        }
    }

    /// Adds what counters went up by.
    fn count(&mut self, files: &[(PathBuf, u64)]) {
        let before = std::mem::take(&mut self.counters);
        for (index, (file, most)) in files.iter().enumerate() {
            let now = self.root.counter(file);
            if let (Some(now), Some(before)) = (now, before.get(index).copied().flatten()) {
                // One that starts anew does so behind its largest number.
                let more = now.checked_sub(before).unwrap_or_else(|| {
                    now.saturating_add(most.saturating_sub(before)).saturating_add(1)
                });
                *self.joules.get_or_insert(0.0) += more as f64 / 1e6;
            }
            self.counters.push(now);
        }
    }

    /// Adds power over time, between two samples their mean.
    fn integrate(&mut self, at: f64, watts: Option<f64>) {
        let Some(watts) = watts else { return };
        if let Some((since, before)) = self.power {
            *self.joules.get_or_insert(0.0) += (at - since) * (watts + before) / 2.0;
        }
        self.power = Some((at, watts));
    }

    pub(super) fn readings(self) -> Readings {
        let clocks = self.clocks.map(|(all, count)| Clocks { mean: all.mean / count, ..all });
        Readings {
            seconds: self.seconds,
            first: self.first,
            last: self.last,
            hottest: self.hottest,
            clocks,
            joules: self.joules,
            source: self.source.name(),
        }
    }
}

impl Readings {
    /// Joules a token, if energy is known and there were tokens.
    fn joules_per_token(&self, tokens: u64) -> Option<f64> {
        self.joules.filter(|_| tokens > 0).map(|joules| joules / tokens as f64)
    }

    fn mean_power_w(&self) -> Option<f64> {
        self.joules.filter(|_| self.seconds > 0.0).map(|joules| joules / self.seconds)
    }

    /// The figures of `tokens` tokens; what no sensor shows is null.
    pub(crate) fn json(&self, tokens: u64) -> Value {
        let celsius = |of: &Option<Temperature>| of.as_ref().map(|of| of.celsius);
        json!({"device": {
            "seconds": self.seconds,
            "tokens": tokens,
            "temperature_c": celsius(&self.last),
            "temperature_begin_c": celsius(&self.first),
            "temperature_max_c": celsius(&self.hottest),
            "thermal_zone": self.hottest.as_ref().map(|of| &of.zone),
            "clock_mean_mhz": self.clocks.map(|clocks| clocks.mean),
            "clock_min_mhz": self.clocks.map(|clocks| clocks.least),
            "clock_max_mhz": self.clocks.map(|clocks| clocks.most),
            "energy_source": self.source,
            "energy_j": self.joules,
            "energy_per_token_j": self.joules_per_token(tokens),
            "mean_power_w": self.mean_power_w(),
        }})
    }

    /// The same in a line for people.
    pub(crate) fn line(&self, tokens: u64) -> String {
        let mut parts = Vec::new();
        if let (Some(first), Some(hottest)) = (&self.first, &self.hottest) {
            let (from, to, zone) = (first.celsius, hottest.celsius, &hottest.zone);
            parts.push(format!("{from:.1} to {to:.1} °C ({zone})"));
        }
        if let Some(Clocks { least, mean, most }) = self.clocks {
            parts.push(format!("clocks {mean:.0} MHz ({least:.0} to {most:.0})"));
        }
        if let (Some(watts), Some(joules)) = (self.mean_power_w(), self.joules) {
            let each = self.joules_per_token(tokens).unwrap_or(joules);
            parts.push(format!("{watts:.2} W, {each:.3} J a token ({})", self.source));
        } else {
            parts.push("no energy sensor that may be read".into());
        }
        format!("device: {}", parts.join("; "))
    }
}
