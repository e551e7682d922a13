//! The metrics of one moment.
//!
//! Invariant: every family has a unique name and at least one sample, so that [`Families::text`] writes a valid exposition.

use prometheus::TextEncoder;
use prometheus::core::Collector;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use thaw_pools::statistics::{BOUNDS_NS, Times};

/// The media type of [`Families::text`].
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The names and values of labels.
pub type Labels<'a, const N: usize> = [(&'static str, &'a str); N];

/// Families of metrics.
#[derive(Debug, Default)]
pub struct Families(Vec<MetricFamily>);

impl Families {
    /// Counters. The name ends in `_total`.
    pub fn counters<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels<'a, N>, u64)>,
    ) {
        let metrics = samples.into_iter().map(|(labels, value)| {
            let mut counter = Counter::default();
            counter.set_value(value as f64);
            let mut metric = labelled(labels);
            metric.set_counter(counter);
            metric
        });
        self.add(name, help, MetricType::COUNTER, metrics.collect());
    }

    /// One counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help, [([], value)]);
    }

    /// Counters of time. The name ends in `_seconds_total`.
    pub fn seconds(&mut self, name: &str, help: &str, seconds: f64) {
        let mut counter = Counter::default();
        counter.set_value(seconds);
        let mut metric = labelled([]);
        metric.set_counter(counter);
        self.add(name, help, MetricType::COUNTER, vec![metric]);
    }

    /// Gauges.
    pub fn gauges<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels<'a, N>, f64)>,
    ) {
        let metrics = samples.into_iter().map(|(labels, value)| {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            let mut metric = labelled(labels);
            metric.set_gauge(gauge);
            metric
        });
        self.add(name, help, MetricType::GAUGE, metrics.collect());
    }

    /// One gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.gauges(name, help, [([], value)]);
    }

    /// Histograms of durations, in seconds.
    pub fn times<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels<'a, N>, Times)>,
    ) {
        let metrics = samples.into_iter().map(|(labels, times)| {
            let mut metric = labelled(labels);
            metric.set_histogram(histogram(&times));
            metric
        });
        self.add(name, help, MetricType::HISTOGRAM, metrics.collect());
    }

    /// The families of a collector.
    pub fn collected(&mut self, collector: &impl Collector) {
        let families = collector.collect();
        self.0
            .extend(families.into_iter().filter(|f| !f.get_metric().is_empty()));
    }

    /// The exposition: Prometheus's text format, 0.0.4.
    pub fn text(&self) -> String {
        TextEncoder::new()
            .encode_to_string(&self.0)
            .expect("every family has a name and samples of its type")
    }

    fn add(&mut self, name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) {
        if metrics.is_empty() {
            return;
        }
        let mut family = MetricFamily::default();
        family.set_name(name.into());
        family.set_help(help.into());
        family.set_field_type(kind);
        family.set_metric(metrics);
        self.0.push(family);
    }
}

fn labelled<const N: usize>(labels: Labels<'_, N>) -> Metric {
    let pairs = labels.map(|(name, value)| {
        let mut pair = LabelPair::default();
        pair.set_name(name.into());
        pair.set_value(value.into());
        pair
    });
    Metric::from_label(pairs.into())
}

fn histogram(times: &Times) -> Histogram {
    let mut below = 0;
    let buckets = BOUNDS_NS.iter().zip(&times.counts).map(|(bound, count)| {
        below += count;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound as f64 / 1e9);
        bucket.set_cumulative_count(below);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(times.counts.iter().sum());
    histogram.set_sample_sum(times.sum_ns as f64 / 1e9);
    histogram
}
