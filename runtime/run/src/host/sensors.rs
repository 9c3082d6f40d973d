//! Sensors: temperature, clocks, and energy or power.
//!
//! Energy is taken from the first of these that can be read: RAPL's counters of whole packages (x86); the INA chips of boards
//! such as Jetson's, by hwmon or by the older drivers for i2c; a battery that is being discharged (phones).

use super::Root;
use std::path::{Path, PathBuf};

/// The hottest thermal zone.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Temperature {
    pub(super) celsius: f64,
    pub(super) zone: String,
}

/// Current clocks of the processors, MHz.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Clocks {
    pub(super) least: f64,
    pub(super) mean: f64,
    pub(super) most: f64,
}

/// Where energy is read.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum EnergySource {
    /// Counters in microjoules, and the largest number that each shows before it starts anew.
    Counters(Vec<(PathBuf, u64)>),
    /// Rails.
    Rails(Vec<Rail>),
    /// Nothing can be read.
    None,
}

/// A wire whose power is known.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rail {
    name: String,
    /// The product of these files and `scale` is its power in watts.
    factors: Vec<PathBuf>,
    scale: f64,
}

/// Rails that everything else hangs on: where there is one the others are part of it.
const WHOLE: [&str; 3] = ["VDD_IN", "POM_5V_IN", "5V_IN"];
/// Not connected; fed by another rail.
const NOT_COUNTED: [&str; 2] = ["NC", "VDDQ_VDD2_1V8AO"];
/// A chip has so many channels; further ones are sums.
const CHANNELS: u32 = 3;

impl Root {
    /// Of the zones that show a temperature between -50 and 200 degrees.
    pub(super) fn temperature(&self) -> Option<Temperature> {
        let zones = self.entries("sys/class/thermal");
        let temperatures =
            zones.iter().filter(|zone| named(zone, "thermal_zone")).filter_map(|zone| {
                let celsius = self.number(zone.join("temp"))? as f64 / 1000.0;
                let kind = self.read(zone.join("type"))?;
                (-50.0..200.0)
                    .contains(&celsius)
                    .then(|| Temperature { celsius, zone: kind.trim().into() })
            });
        temperatures.max_by(|a, b| a.celsius.total_cmp(&b.celsius))
    }

    /// Of all processors that tell.
    pub(super) fn clocks(&self) -> Option<Clocks> {
        let cpus = self.entries("sys/devices/system/cpu");
        let clocks: Vec<f64> = cpus
            .iter()
            .filter(|cpu| named(cpu, "cpu"))
            .filter_map(|cpu| self.count(cpu.join("cpufreq/scaling_cur_freq")))
            .map(|khz| khz as f64 / 1000.0)
            .collect();
        let least = clocks.iter().copied().min_by(f64::total_cmp)?;
        let most = clocks.iter().copied().max_by(f64::total_cmp)?;
        Some(Clocks { least, mean: clocks.iter().sum::<f64>() / clocks.len() as f64, most })
    }

    /// The best source.
    pub(super) fn energy_source(&self) -> EnergySource {
        let counters = self.packages();
        if !counters.is_empty() {
            return EnergySource::Counters(counters);
        }
        let rails = [self.hwmon_rails(), self.i2c_rails(), self.batteries()];
        match rails.into_iter().map(counted).find(|rails| !rails.is_empty()) {
            Some(rails) => EnergySource::Rails(rails),
            None => EnergySource::None,
        }
    }

    /// `intel-rapl:0` and its like: what is behind a second colon is part of them.
    fn packages(&self) -> Vec<(PathBuf, u64)> {
        let zones = self.entries("sys/class/powercap");
        let packages = zones.iter().filter(|zone| named(zone, "intel-rapl:"));
        packages
            .filter(|zone| {
                self.read(zone.join("name")).is_some_and(|name| name.starts_with("package"))
            })
            .filter_map(|zone| {
                let counter = zone.join("energy_uj");
                // Often for the superuser only.
                self.count(&counter)?;
                Some((counter, self.count(zone.join("max_energy_range_uj")).unwrap_or(u64::MAX)))
            })
            .collect()
    }

    fn hwmon_rails(&self) -> Vec<Rail> {
        let mut rails = Vec::new();
        for chip in self.entries("sys/class/hwmon") {
            if !self.read(chip.join("name")).is_some_and(|name| name.starts_with("ina")) {
                continue;
            }
            for channel in 1..=CHANNELS {
                let file = |kind: &str, what: &str| chip.join(format!("{kind}{channel}_{what}"));
                let label = self.read(file("in", "label"));
                let name = label.map_or(format!("channel {channel}"), |label| label.trim().into());
                let (power, volts, amperes) =
                    (file("power", "input"), file("in", "input"), file("curr", "input"));
                if self.count(&power).is_some() {
                    rails.push(Rail { name, factors: vec![power], scale: 1e-6 });
                } else if self.count(&volts).is_some() && self.number(&amperes).is_some() {
                    rails.push(Rail { name, factors: vec![volts, amperes], scale: 1e-6 });
                }
            }
        }
        rails
    }

    /// Jetson boards before hwmon had the chips.
    fn i2c_rails(&self) -> Vec<Rail> {
        let mut rails = Vec::new();
        for chip in self.entries("sys/bus/i2c/drivers/ina3221x") {
            for device in self.entries(&chip).iter().filter(|path| named(path, "iio:device")) {
                for channel in 0..CHANNELS {
                    let power = device.join(format!("in_power{channel}_input"));
                    let name = self.read(device.join(format!("rail_name_{channel}")));
                    if let (Some(_), Some(name)) = (self.count(&power), name) {
                        let name = name.trim().to_owned();
                        rails.push(Rail { name, factors: vec![power], scale: 1e-3 });
                    }
                }
            }
        }
        rails
    }

    fn batteries(&self) -> Vec<Rail> {
        let supplies = self.entries("sys/class/power_supply");
        let is = |supply: &Path, file: &str, what: &str| {
            self.read(supply.join(file)).is_some_and(|text| text.trim() == what)
        };
        let drained = supplies
            .into_iter()
            .filter(|supply| is(supply, "type", "Battery") && is(supply, "status", "Discharging"));
        let rail = |supply: PathBuf| {
            let factors = vec![supply.join("current_now"), supply.join("voltage_now")];
            let readable = factors.iter().all(|file| self.number(file).is_some());
            readable.then(|| Rail { name: "battery".into(), factors, scale: 1e-12 })
        };
        drained.filter_map(rail).collect()
    }

    /// A rail's power, watts. Drivers differ in which way a current counts as positive.
    pub(super) fn power(&self, rail: &Rail) -> Option<f64> {
        let numbers = rail.factors.iter().map(|file| self.number(file));
        let product = numbers.map(|number| number.map(|n| n as f64)).product::<Option<f64>>()?;
        Some((product * rail.scale).abs())
    }

    /// A counter's microjoules.
    pub(super) fn counter(&self, file: &Path) -> Option<u64> {
        self.count(file)
    }
}

impl EnergySource {
    /// For people.
    pub(super) fn name(&self) -> String {
        match self {
            EnergySource::Counters(counters) => format!("RAPL, {} packages", counters.len()),
            EnergySource::Rails(rails) => {
                rails.iter().map(|rail| rail.name.as_str()).collect::<Vec<_>>().join(" + ")
            }
            EnergySource::None => "none".into(),
        }
    }
}

/// Of all rails those whose sum is what the board takes.
fn counted(rails: Vec<Rail>) -> Vec<Rail> {
    let whole = |rail: &Rail| WHOLE.contains(&rail.name.as_str());
    if let Some(rail) = rails.iter().find(|rail| whole(rail)) {
        return vec![rail.clone()];
    }
    rails.into_iter().filter(|rail| !NOT_COUNTED.contains(&rail.name.as_str())).collect()
}

/// Whether a path's name is `prefix` and a number.
fn named(path: &Path, prefix: &str) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix(prefix)
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}
