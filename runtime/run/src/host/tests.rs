//! Machines as trees of files.

use super::meter::Sampler;
use super::{Root, Threads};
use ls_bundle::ids::ByteCount;

const MIB: u64 = 1 << 20;

/// A machine whose files are these.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(files: &[(&str, &str)]) -> Fixture {
        let fixture = Fixture { folder: tempfile::tempdir().unwrap() };
        files.iter().for_each(|(path, text)| fixture.write(path, text));
        fixture
    }

    fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn root(&self) -> Root {
        Root::at(self.folder.path())
    }

    fn threads(&self) -> Threads {
        self.root().threads()
    }

    /// What is available, and the default budget.
    fn budget(&self) -> (u64, ByteCount) {
        let memory = self.root().memory();
        (memory.available().unwrap(), memory.default_budget().unwrap().bytes)
    }
}

/// Jetson AGX Orin: twelve equal cores without capacities, little free but much available.
fn jetson() -> Fixture {
    let fixture = Fixture::new(&[
        (
            "proc/meminfo",
            "MemTotal:       31287504 kB\nMemFree:          812340 kB\nMemAvailable:   24117248 kB\n\
             Buffers:          120332 kB\nCached:         22034120 kB\nSwapTotal:      15643744 kB\n",
        ),
        ("proc/self/status", "Name:\tls-run\nCpus_allowed:\tfff\nCpus_allowed_list:\t0-11\n"),
        ("proc/self/cgroup", "0::/user.slice/user-1000.slice/session-3.scope\n"),
        ("sys/devices/system/cpu/online", "0-11\n"),
        ("sys/fs/cgroup/user.slice/memory.max", "max\n"),
        ("sys/fs/cgroup/user.slice/cpu.max", "max 100000\n"),
        ("sys/class/thermal/thermal_zone0/type", "cpu-thermal\n"),
        ("sys/class/thermal/thermal_zone0/temp", "47812\n"),
        ("sys/class/thermal/thermal_zone1/type", "gpu-thermal\n"),
        ("sys/class/thermal/thermal_zone1/temp", "52250\n"),
        // A sensor that is off.
        ("sys/class/thermal/thermal_zone2/type", "cv0-thermal\n"),
        ("sys/class/thermal/thermal_zone2/temp", "-256000\n"),
        ("sys/class/hwmon/hwmon0/name", "pwmfan\n"),
    ]);
    for (cpu, khz) in [(0, "2200000"), (1, "730000")] {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq");
        fixture.write(&path, khz);
    }
    let rails = [("VDD_GPU_SOC", 4800), ("VDD_CPU_CV", 1600), ("VIN_SYS_5V0", 3000)];
    for (channel, (label, milliamperes)) in (1..).zip(rails) {
        let file =
            |kind: &str, what: &str| format!("sys/class/hwmon/hwmon3/{kind}{channel}_{what}");
        fixture.write(&file("in", "label"), label);
        fixture.write(&file("in", "input"), "5000\n");
        fixture.write(&file("curr", "input"), milliamperes.to_string());
    }
    fixture.write("sys/class/hwmon/hwmon3/name", "ina3221\n");
    // Of shunts, and the sum of currents.
    fixture.write("sys/class/hwmon/hwmon3/in4_input", "9\n");
    fixture.write("sys/class/hwmon/hwmon3/curr4_input", "9400\n");
    fixture.write("sys/class/hwmon/hwmon4/name", "ina3221\n");
    fixture.write("sys/class/hwmon/hwmon4/in2_label", "VDDQ_VDD2_1V8AO\n");
    fixture.write("sys/class/hwmon/hwmon4/in2_input", "5000\n");
    fixture.write("sys/class/hwmon/hwmon4/curr2_input", "700\n");
    fixture
}

#[test]
fn a_jetson_uses_all_cores_and_what_is_available_not_what_is_free() {
    let jetson = jetson();
    assert_eq!(jetson.threads(), Threads { count: 12, allowed: 12, big: 12, quota: None });
    let available = 24_117_248 * 1024;
    assert_eq!(jetson.budget(), (available, ByteCount(available - 512 * MIB)));
}

#[test]
fn a_jetsons_rails_are_added_up_without_those_that_others_feed() {
    let mut sampler = Sampler::new(&jetson().root());
    // The folder is gone by now: nothing more is read, and nothing is made up.
    sampler.sample(1.0);
    let gone = sampler.readings().json(10);
    assert_eq!(gone["device"]["energy_j"], serde_json::Value::Null);

    let jetson = jetson();
    let mut sampler = Sampler::new(&jetson.root());
    sampler.sample(2.0);
    jetson.write("sys/class/thermal/thermal_zone1/temp", "61000\n");
    // 47 watts before, 27 watts now: 37 on average.
    jetson.write("sys/class/hwmon/hwmon3/curr1_input", "800");
    sampler.sample(3.0);
    let readings = sampler.readings();
    let device = &readings.json(131)["device"];
    assert_eq!(device["energy_source"], "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0");
    assert!((device["energy_j"].as_f64().unwrap() - 131.0).abs() < 1e-9, "{device}");
    assert!((device["energy_per_token_j"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    assert!((device["mean_power_w"].as_f64().unwrap() - 131.0 / 3.0).abs() < 1e-9);
    let temperatures = ["temperature_begin_c", "temperature_c", "temperature_max_c"]
        .map(|name| device[name].clone());
    assert_eq!(temperatures, [52.25, 61.0, 61.0]);
    assert_eq!(device["thermal_zone"], "gpu-thermal");
    assert_eq!(device["clock_mean_mhz"], 1465.0);
    let line = readings.line(131);
    assert!(line.contains("61.0 °C (gpu-thermal)") && line.contains("1.000 J a token"), "{line}");
}

#[test]
fn a_boards_whole_input_stands_for_its_parts() {
    let board = Fixture::new(&[]);
    for (channel, label, milliwatts) in [(0, "POM_5V_IN", "7500"), (1, "POM_5V_CPU", "2500")] {
        let folder = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0";
        board.write(&format!("{folder}/rail_name_{channel}"), label);
        board.write(&format!("{folder}/in_power{channel}_input"), milliwatts);
    }
    let mut sampler = Sampler::new(&board.root());
    sampler.sample(2.0);
    let device = sampler.readings().json(0)["device"].clone();
    assert_eq!(
        (&device["energy_j"], &device["energy_source"]),
        (&15.0.into(), &"POM_5V_IN".into())
    );
    assert_eq!(device["energy_per_token_j"], serde_json::Value::Null, "no tokens");
}

/// A phone: two prime, three middle and three little cores, one of them off; a battery; a sandbox.
fn phone() -> Fixture {
    let fixture = Fixture::new(&[
        (
            "proc/meminfo",
            "MemTotal:       11534336 kB\nMemFree:          204800 kB\nMemAvailable:    5242880 kB\n",
        ),
        ("proc/self/status", "Cpus_allowed_list:\t0-7\n"),
        ("proc/self/cgroup", "3:cpuset:/top-app\n2:cpu:/\n1:blkio:/\n0::/uid_10234/pid_7\n"),
        ("sys/devices/system/cpu/online", "0-1,3-7\n"),
        ("system/build.prop", "ro.build.version.sdk=35\n"),
        ("sys/class/power_supply/battery/type", "Battery\n"),
        ("sys/class/power_supply/battery/status", "Discharging\n"),
        ("sys/class/power_supply/battery/current_now", "-1250000\n"),
        ("sys/class/power_supply/battery/voltage_now", "4000000\n"),
        ("sys/class/power_supply/usb/type", "USB\n"),
    ]);
    for (cpu, capacity) in [325, 325, 325, 828, 828, 828, 1024, 1024].into_iter().enumerate() {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
        fixture.write(&path, format!("{capacity}\n"));
    }
    fixture
}

#[test]
fn a_phone_computes_on_its_big_cores() {
    let phone = phone();
    assert_eq!(phone.threads(), Threads { count: 5, allowed: 7, big: 5, quota: None });
    let available = 5 * 1024 * MIB;
    assert_eq!(phone.budget(), (available, ByteCount(available - available / 16)));
    // An app in the background has the little ones only.
    phone.write("proc/self/status", "Cpus_allowed_list:\t0-2\n");
    assert_eq!(phone.threads(), Threads { count: 2, allowed: 2, big: 2, quota: None });
    assert!(ls_io::is_android(phone.folder.path()), "no ring is asked for");
    assert!(!ls_io::is_android(jetson().folder.path()));
}

#[test]
fn a_phones_battery_tells_what_it_gives() {
    let phone = phone();
    let mut sampler = Sampler::new(&phone.root());
    sampler.sample(4.0);
    let device = sampler.readings().json(8)["device"].clone();
    assert_eq!((&device["energy_j"], &device["energy_per_token_j"]), (&20.0.into(), &2.5.into()));
    phone.write("sys/class/power_supply/battery/status", "Charging\n");
    let device = Sampler::new(&phone.root()).readings().json(8)["device"].clone();
    assert_eq!(device["energy_source"], "none");
}

const MEMINFO_64_GIB: &str = "MemTotal: 67108864 kB\nMemAvailable: 50331648 kB\n";

#[test]
fn a_container_of_version_1_has_what_its_limit_leaves() {
    // Without a namespace for groups: the path is the host's, the mount shows the container's own group.
    let mountinfo = "\
        31 23 0:26 /docker/4f2a /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n\
        32 23 0:27 /docker/4f2a /sys/fs/cgroup/cpu,cpuacct ro,nosuid - cgroup cgroup rw,cpu,cpuacct\n";
    let container = Fixture::new(&[
        ("proc/meminfo", MEMINFO_64_GIB),
        ("proc/self/status", "Cpus_allowed_list:\t0-15\n"),
        ("sys/devices/system/cpu/online", "0-15\n"),
        (
            "proc/self/cgroup",
            "9:memory:/docker/4f2a\n4:cpu,cpuacct:/docker/4f2a\n0::/system.slice\n",
        ),
        ("proc/self/mountinfo", mountinfo),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1610612736\n"),
        (
            "sys/fs/cgroup/memory/memory.stat",
            "cache 1\ninactive_file 7\ntotal_inactive_file 1073741824\ntotal_active_file 268435456\n",
        ),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "350000\n"),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
    ]);
    assert_eq!(container.threads(), Threads { count: 3, allowed: 16, big: 16, quota: Some(3.5) });
    // 1.5 GiB are used, of which 1.25 GiB would be given up.
    let available = 1792 * MIB;
    assert_eq!(container.budget(), (available, ByteCount(available - available / 16)));
    let said = container.root().memory().default_budget().unwrap().to_string();
    assert!(said.contains("control group") && said.contains("margin of 112.0 MiB"), "{said}");
    // No limit at all.
    container.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    container.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    assert_eq!(container.threads().quota, None);
    assert_eq!(container.budget().0, 49152 * MIB);
}

/// A container with a namespace of its own for groups.
fn container_2(cpu_max: &str) -> Fixture {
    Fixture::new(&[
        ("proc/meminfo", MEMINFO_64_GIB),
        ("proc/self/status", "Cpus_allowed_list:\t2-5\n"),
        ("sys/devices/system/cpu/online", "0-15\n"),
        ("proc/self/cgroup", "0::/\n"),
        ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"),
        ("sys/fs/cgroup/memory.max", "536870912\n"),
        ("sys/fs/cgroup/memory.current", "402653184\n"),
        (
            "sys/fs/cgroup/memory.stat",
            "anon 1\nfile 9\ninactive_file 134217728\nactive_file 67108864\nslab_reclaimable 33554432\n",
        ),
        ("sys/fs/cgroup/cpu.max", cpu_max),
    ])
}

#[test]
fn a_container_of_version_2_has_what_its_limit_leaves() {
    let container = container_2("max 100000\n");
    assert_eq!(container.threads(), Threads { count: 4, allowed: 4, big: 4, quota: None });
    // 384 MiB are used, of which 224 MiB would be given up; the margin is the least there is.
    assert_eq!(container.budget(), (352 * MIB, ByteCount(330 * MIB)));
    // The machine has less than the limit.
    container.write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 131072 kB\n");
    assert_eq!(container.budget(), (128 * MIB, ByteCount(112 * MIB)));
    let said = container.root().memory().default_budget().unwrap().to_string();
    assert!(said.contains("on this machine"), "{said}");
}

#[test]
fn half_a_processor_is_one_thread() {
    let half = container_2("50000 100000\n");
    assert_eq!(half.threads(), Threads { count: 1, allowed: 4, big: 4, quota: Some(0.5) });
    assert_eq!(half.threads().to_string(), "1 thread, a quota of 0.50 processors");
    assert_eq!(container_2("270000 100000\n").threads().count, 2);
    assert_eq!(container_2("6400000 100000\n").threads().count, 4);
}

#[test]
fn the_tightest_of_nested_groups_counts() {
    let nested = Fixture::new(&[
        ("proc/meminfo", MEMINFO_64_GIB),
        ("proc/self/status", "Cpus_allowed_list:\t0-7\n"),
        ("proc/self/cgroup", "0::/outer/middle/inner\n"),
        ("sys/fs/cgroup/outer/memory.max", "1073741824\n"),
        ("sys/fs/cgroup/outer/memory.current", "943718400\n"),
        ("sys/fs/cgroup/outer/cpu.max", "200000 100000\n"),
        ("sys/fs/cgroup/outer/middle/memory.max", "max\n"),
        ("sys/fs/cgroup/outer/middle/cpu.max", "max 100000\n"),
        ("sys/fs/cgroup/outer/middle/inner/memory.max", "536870912\n"),
        ("sys/fs/cgroup/outer/middle/inner/memory.current", "104857600\n"),
        ("sys/fs/cgroup/outer/middle/inner/cpu.max", "400000 100000\n"),
    ]);
    assert_eq!(nested.threads(), Threads { count: 2, allowed: 8, big: 8, quota: Some(2.0) });
    // The inner group could have 412 MiB more, the outer one 124 MiB.
    assert_eq!(nested.budget().0, 124 * MIB);
    // Where a process is slowed down is a limit too.
    nested.write("sys/fs/cgroup/outer/middle/inner/memory.high", "157286400\n");
    assert_eq!(nested.budget().0, 50 * MIB);
}

#[test]
fn garbled_files_count_as_absent() {
    let garbled = Fixture::new(&[
        ("proc/meminfo", "MemAvailable: 99999999999999999999999 kB\nMemTotal:\n"),
        ("proc/self/status", "Cpus_allowed_list:\t5-2,x\n"),
        ("proc/self/cgroup", "::::\nnonsense\n0::/../../../etc\n4:memory\n"),
        ("proc/self/mountinfo", "short\n1 2 3 - cgroup2\n - \n"),
        ("sys/devices/system/cpu/online", "0-99999999999\n"),
        ("sys/fs/cgroup/memory.max", "-5\n"),
        ("sys/fs/cgroup/cpu.max", "0 0\n"),
        ("sys/class/thermal/thermal_zone0/temp", "hot\n"),
        ("sys/class/thermal/thermal_zone0/type", "x\n"),
        ("sys/class/powercap/intel-rapl:0/name", "package-0\n"),
        ("sys/class/powercap/intel-rapl:0/energy_uj", "-\n"),
        ("sys/devices/system/cpu/cpu0/cpu_capacity", "\n"),
    ]);
    garbled.write("sys/class/hwmon/hwmon0/name", [0xff, 0xfe, 0x00]);
    assert_eq!(garbled.threads(), Threads { count: 1, allowed: 1, big: 1, quota: None });
    let memory = garbled.root().memory();
    assert_eq!((memory.available(), memory.default_budget()), (None, None));
    let readings = Sampler::new(&garbled.root()).readings();
    assert_eq!(readings.json(1)["device"]["temperature_c"], serde_json::Value::Null);
    assert!(readings.line(1).contains("no energy sensor"));
    // An empty machine is no better.
    let nothing = Fixture::new(&[]);
    assert_eq!(nothing.threads().count, 1);
    assert_eq!(nothing.root().memory().available(), None);
}

#[test]
fn so_little_memory_leaves_no_budget_but_no_wrong_one() {
    let tiny = Fixture::new(&[("proc/meminfo", "MemTotal: 65536 kB\nMemAvailable: 8192 kB\n")]);
    assert_eq!(tiny.budget(), (8 * MIB, ByteCount(0)));
}

#[test]
fn counters_of_energy_are_followed_round_their_end() {
    let package =
        |number: u32, file: &str| format!("sys/class/powercap/intel-rapl:{number}/{file}");
    let server = Fixture::new(&[
        // A part of the first package, and what is no package.
        ("sys/class/powercap/intel-rapl:0:0/name", "core\n"),
        ("sys/class/powercap/intel-rapl:0:0/energy_uj", "1\n"),
        ("sys/class/powercap/intel-rapl:2/name", "psys\n"),
        ("sys/class/powercap/intel-rapl:2/energy_uj", "1\n"),
    ]);
    for (number, energy) in [(0, "1000000"), (1, "262143000000")] {
        server.write(&package(number, "name"), format!("package-{number}\n"));
        server.write(&package(number, "energy_uj"), energy);
        server.write(&package(number, "max_energy_range_uj"), "262143328850\n");
    }
    let mut sampler = Sampler::new(&server.root());
    server.write(&package(0, "energy_uj"), "6000000");
    server.write(&package(1, "energy_uj"), "671149");
    sampler.sample(3.0);
    let device = sampler.readings().json(12)["device"].clone();
    // 5 J, and 0.328851 J to the end and 0.671149 J behind it.
    assert!((device["energy_j"].as_f64().unwrap() - 6.0).abs() < 1e-6, "{device}");
    assert!((device["mean_power_w"].as_f64().unwrap() - 2.0).abs() < 1e-6);
    assert_eq!(device["energy_source"], "RAPL, 2 packages");
}

#[test]
fn this_machine_has_threads_and_memory() {
    let here = Root::here();
    assert_eq!(here.threads().count, std::thread::available_parallelism().unwrap().get());
    assert!(here.memory().available().unwrap() > 0);
}
