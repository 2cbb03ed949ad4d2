// Command kube reads YAML documents from standard input and decodes each as the type that the Kubernetes API has for it:
// unknown fields, fields twice, and values of another type or form (quantities, ports, durations) are errors. Kinds of
// other groups, such as ServiceMonitor, are counted and not looked into. A module of its own keeps these types
// out of the product's.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
)

func main() {
	if err := check(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func check(in io.Reader, out io.Writer) error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, batchv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme, policyv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	decoded, foreign := 0, 0
	var failed error
	for r := yaml.NewYAMLReader(bufio.NewReader(in)); ; {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if len(bytes.TrimSpace(doc)) == 0 || !bytes.Contains(doc, []byte("kind:")) {
			continue
		}
		if bytes.Contains(doc, []byte("apiVersion: monitoring.coreos.com/v1")) {
			foreign++
			continue
		}
		if _, kind, err := decoder.Decode(doc, nil, nil); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%v: %w: %s", kind, err, strings.SplitN(string(doc), "spec:", 2)[0]))
		}
		decoded++
	}
	fmt.Fprintf(out, "decoded %d foreign %d\n", decoded, foreign)
	return failed
}
